"""Tests of kernels for Windows and macOS: as ELF, the format of kernels that llmrun compiles on the user's machine, and
in the systems' own formats, from which the libraries in wheels are linked.

The objects for Windows also run, in Wine: `scripts/test_windows`.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys

import capstone
import pytest
from msgspec.structs import replace

from llmrun.base.compiled.kernel import KernelName
from llmrun.base.compiled.levels import AVX2, AVX512_VNNI, NEON_DOT, PORTABLE, Level, Target
from llmrun.kernels.object_file import ALLOWED_UNDEFINED, symbols
from tests.support.cli.commands import ROOT
from tests.support.kernels.objects import object_images
from tests.support.kernels.runs import TARGETS

WINDOWS, MAC, INTEL_MAC = "x86_64-pc-windows-msvc", "arm64-apple-macosx", "x86_64-apple-macosx"
FORMATS = {
    (WINDOWS, AVX512_VNNI.name): AVX512_VNNI,
    (WINDOWS, PORTABLE.name): PORTABLE,
    (MAC, NEON_DOT.name): NEON_DOT,
    (INTEL_MAC, AVX2.name): AVX2,
}
HEAD: dict[str, int | str] = {"head_size": 48, "value_size": 48, "keys": "f16", "values": "f16"}
KERNELS = (
    KernelName.of("linear.int8", "linear", weight="q4_1"),
    KernelName.of("attention.attention", "attention", group=1, **HEAD),
    KernelName.of("rows.norms", "rmsnorm"),
    KernelName.of("recurrent.recurrences", "delta_rule", vectors=1),
    KernelName.of("sampling.chain", "sample"),
    KernelName.of("team", "work_timed"),
)
LARGE_FRAMES = {"linear", "attention", "delta_rule"}  # at the level portable, where vectors need many registers
CONSTANTS = ("__real@", "__xmm@", "__ymm@", "__zmm@")  # COFF shares equal constants between objects

pytestmark = pytest.mark.push


def target_of(triple: str, level: Level) -> Target:
    return replace(TARGETS[level.name], triple=triple)


def elf_images(triple: str, level: Level) -> dict[KernelName, bytes]:
    return object_images(KERNELS, target_of(f"{triple}-elf", level))


@pytest.mark.night
@pytest.mark.parametrize(("triple", "level"), FORMATS)
def test_elf_objects_for_every_system_have_one_symbol(triple: str, level: str) -> None:
    for name, image in elf_images(triple, FORMATS[triple, level]).items():
        defined, undefined = symbols(image)
        assert defined == {name.symbol}
        probes = triple == WINDOWS and level == PORTABLE.name and name.function in LARGE_FRAMES
        assert ("__chkstk" in undefined) == probes
        assert undefined <= ALLOWED_UNDEFINED


@pytest.mark.night
def test_coff_and_mach_o_objects_need_nothing_else() -> None:
    """COFF objects also need `_fltused`, and define constants that objects share."""
    requests = [
        {
            "module": name.module,
            "name": name.function,
            "parameters": dict(name.parameters),
            "level_name": level.name,
            "triples": [triple],
            "cpu": TARGETS[level.name].cpu,
            "features": TARGETS[level.name].features,
            "symbol": "llmrun_kernel",
        }
        for (triple, _), level in FORMATS.items()
        for name in KERNELS
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.foreign_objects"],
        input="\n".join(map(json.dumps, requests)),
        env=os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for request, line in zip(requests, done.stdout.splitlines(), strict=True):
        defined, undefined = json.loads(line)
        assert [name for name in defined if not name.startswith(CONSTANTS)] == ["llmrun_kernel"]
        extra = {"_fltused"} if request["triples"] == [WINDOWS] else set()
        assert set(undefined) <= ALLOWED_UNDEFINED | extra


def instructions_of(image: bytes) -> list[capstone.CsInsn]:
    """Disassemble the first function of an ELF object, up to its first return."""
    offset = struct.unpack_from("<Q", image, 0x28)[0]
    size, count = struct.unpack_from("<HH", image, 0x3A)
    for header in range(offset, offset + size * count, size):
        flags, _, start, length = struct.unpack_from("<QQQQ", image, header + 8)
        if flags & 4 and length:  # SHF_EXECINSTR
            decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
            return list(decoder.disasm(image[start : start + length], 0))
    raise AssertionError("no code")


@pytest.mark.parametrize("level", [AVX512_VNNI, PORTABLE], ids=lambda level: level.name)
def test_kernels_for_windows_follow_its_calling_convention(level: Level) -> None:
    """They save rdi, rsi and xmm6 to xmm15 before they change them. On other systems, they need not."""
    for name, image in elf_images(WINDOWS, level).items():
        saved: set[str] = set()
        for instruction in instructions_of(image):
            words = f"{instruction.mnemonic} {instruction.op_str}"
            stored = re.fullmatch(r"(?:v?mov\w+ xmmword ptr \[.*\], xmm|push r)(\w+)", words)
            if stored:
                saved.add(stored[1])
                continue
            written = re.match(r"\w+ (?:[xyz]mm([6-9]|1[0-5])|[er]([ds]i))(?=,|$| \{)", words)
            if written and not words.startswith(("cmp ", "test ", "push ")):
                assert (written[1] or written[2]) in saved, f"{name.function}: {words}"
