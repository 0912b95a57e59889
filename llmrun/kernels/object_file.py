"""Reads ELF symbol tables, to check which symbol a kernel's object file defines and which functions it calls."""

from __future__ import annotations

import struct

# LLVM may replace loops with calls to these functions, which exist in every process. Any other function may be
# missing in the process that loads the kernel. For example, a call to `__extendhfsf2` jumped to address zero. On
# Windows, functions with more than a page of local variables call `__chkstk`, which grows the stack page by page. Below
# AVX-512, about 20 kernels do. Every Windows process has that function in ntdll.dll.
ALLOWED_UNDEFINED = frozenset({"memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_", "__chkstk"})

MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little-endian
_SYMBOL_TABLE = 2  # SHT_SYMTAB, a value of sh_type
_UNDEFINED = 0  # SHN_UNDEF, a value of st_shndx


class ForeignSymbolError(Exception):
    """A kernel calls a function that is not on the allow-list, or its object file is malformed."""


def symbols(image: bytes) -> tuple[set[str], set[str]]:
    """Return (defined global names, undefined names) of a 64-bit little-endian ELF object."""
    if not image.startswith(MAGIC):
        raise ForeignSymbolError("a kernel's object file is not 64-bit little-endian ELF")
    section_offset = struct.unpack_from("<Q", image, 0x28)[0]
    entry_size, n_sections = struct.unpack_from("<HH", image, 0x3A)
    defined: set[str] = set()
    undefined: set[str] = set()
    for index in range(n_sections):
        header = section_offset + index * entry_size
        kind = struct.unpack_from("<I", image, header + 4)[0]
        if kind != _SYMBOL_TABLE:
            continue
        offset, size = struct.unpack_from("<QQ", image, header + 0x18)
        strings_index = struct.unpack_from("<I", image, header + 0x28)[0]
        strings_offset = struct.unpack_from("<Q", image, section_offset + strings_index * entry_size + 0x18)[0]
        for entry in range(offset, offset + size, 24):
            name_offset, info, _, section = struct.unpack_from("<IBBH", image, entry)
            start = strings_offset + name_offset
            name = image[start : image.index(b"\0", start)].decode()
            if not name:
                continue
            if section == _UNDEFINED:
                undefined.add(name)
            elif info >> 4:  # the symbol is not STB_LOCAL
                defined.add(name)
    return defined, undefined


def check_symbols(image: bytes, symbol: str) -> None:
    """Raise ForeignSymbolError unless the object defines `symbol` and calls only functions on the allow-list."""
    defined, undefined = symbols(image)
    if symbol not in defined:
        raise ForeignSymbolError(f"a kernel's object file does not define {symbol}: it defines {sorted(defined)}")
    foreign = undefined - ALLOWED_UNDEFINED
    if foreign:
        raise ForeignSymbolError(f"a kernel must not call {sorted(foreign)}")
