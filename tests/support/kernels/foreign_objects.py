"""Compiles kernels into the object formats of other systems: COFF for Windows and Mach-O for macOS.

    python -m tests.support.kernels.foreign_objects < REQUESTS

Wheels for these systems are linked from such objects. Each line of REQUESTS has the arguments of `compile_kernel`, as
JSON. The output has one line for each: [defined global names, undefined names].
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator

Symbols = tuple[set[str], set[str]]  # defined global names, undefined names


def coff_symbols(image: bytes) -> Symbols:
    """Return the symbols of a COFF object for 64-bit x86 or Arm processors."""
    machine, _, _, table, count = struct.unpack_from("<HHIII", image)
    assert machine in (0x8664, 0xAA64)
    strings = table + 18 * count
    defined: set[str] = set()
    undefined: set[str] = set()
    number = 0
    while number < count:
        raw, _, section, _, storage, more = struct.unpack_from("<8sIhHBB", image, table + 18 * number)
        zeros, offset = struct.unpack("<II", raw)
        name = raw.rstrip(b"\0") if zeros else image[strings + offset : image.index(b"\0", strings + offset)]
        if storage == 2:  # IMAGE_SYM_CLASS_EXTERNAL
            (undefined if section == 0 else defined).add(name.decode())
        number += 1 + more
    return defined, undefined


def macho_symbols(image: bytes) -> Symbols:
    """Return the symbols of a 64-bit Mach-O object, without the underscore at the beginning of C names."""
    magic, _, _, _, commands = struct.unpack_from("<IIIII", image)
    assert magic == 0xFEEDFACF
    defined: set[str] = set()
    undefined: set[str] = set()
    for kind, at in _load_commands(image, commands):
        if kind == 2:  # LC_SYMTAB
            table, count, strings, _ = struct.unpack_from("<IIII", image, at + 8)
            for number in range(count):
                name_at, flags, _, _, _ = struct.unpack_from("<IBBHQ", image, table + 16 * number)
                start = strings + name_at
                name = image[start : image.index(b"\0", start)].decode().removeprefix("_")
                if flags & 1:  # N_EXT
                    (defined if flags & 0x0E else undefined).add(name)
    return defined, undefined


def _load_commands(image: bytes, count: int) -> Iterator[tuple[int, int]]:
    """Yield the kind and the offset of each load command of a Mach-O object."""
    at = 32
    for _ in range(count):
        kind, size = struct.unpack_from("<II", image, at)
        yield kind, at
        at += size


def main() -> None:
    from llvmlite import binding as llvm

    from llmrun.kernels import compiler
    from llmrun.kernels.faster_numba import make_faster

    make_faster()
    compiler._optimize_only_kernels()
    compiler._make_no_code_for_this_process()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for line in sys.stdin:
        request = json.loads(line)
        (image,) = compiler.compile_kernel(**request)
        read = coff_symbols if "windows" in request["triples"][0] else macho_symbols
        print(json.dumps([sorted(names) for names in read(image)]))  # noqa: T201


if __name__ == "__main__":
    main()
