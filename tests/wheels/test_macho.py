"""Tests of the checks of libraries for macOS, with a library that zig linked: its C code is in ANSWER."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path

import pytest

from tests.support.wheels.macho import BadDylib, read_dylib

# The command: zig cc -target aarch64-macos.11.0 -O2 -s -shared -o answer.dylib answer.c
ANSWER = "#include <string.h>\nint answer(char *to) { memset(to, 42, 100000); return 42; }"
LIBRARY = gzip.decompress((Path(__file__).parents[1] / "data" / "answer.dylib.gz").read_bytes())
SIGNATURE = LIBRARY.index(b"\xfa\xde\x0c\xc0")
CODE_DIRECTORY = LIBRARY.index(b"\xfa\xde\x0c\x02")


def test_a_sound_library_is_described(tmp_path: Path) -> None:
    path = tmp_path / "answer.dylib"
    path.write_bytes(LIBRARY)
    found = read_dylib(path)
    assert found.minimum == (11, 0)
    assert found.libraries == ["/usr/lib/libSystem.B.dylib"]
    assert found.exported == {"answer", "_mh_dylib_header", "__dso_handle"}
    assert found.undefined == {"memset", "dyld_stub_binder"}


def changed(at: int, *values: int) -> bytes:
    """Return the library with other bytes at an offset."""
    return LIBRARY[:at] + bytes(values) + LIBRARY[at + len(values) :]


def without_command(kind: int) -> bytes:
    """Return the library with a load command that nothing knows instead of the one of a kind."""
    at = 32
    while struct.unpack_from("<I", LIBRARY, at)[0] != kind:
        at += struct.unpack_from("<I", LIBRARY, at + 4)[0]
    return changed(at, 0xFF, 0xFF)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param(b"", "truncated", id="empty"),
        pytest.param(LIBRARY[:200], "longer than the file", id="only load commands"),
        pytest.param(changed(4, 0x07, 0, 0, 1), "not a library for 64-bit Arm", id="x86-64"),
        pytest.param(changed(12, 2), "not a library for 64-bit Arm", id="a program"),
        pytest.param(changed(0x4001, LIBRARY[0x4001] ^ 1), "page 1 has another SHA-256", id="another instruction"),
        pytest.param(changed(SIGNATURE - 1, LIBRARY[SIGNATURE - 1] ^ 1), "page 3 has another SHA-256", id="a symbol"),
        pytest.param(LIBRARY[:-1], "longer than the file", id="one byte missing"),
        pytest.param(LIBRARY + b"\0", "not at the end of the file", id="one byte more"),
        pytest.param(without_command(0x1D), "no signature", id="unsigned"),
        pytest.param(changed(SIGNATURE, 0), "signature is damaged", id="no signature"),
        pytest.param(changed(CODE_DIRECTORY + 15, 0), "not ad hoc", id="signed by someone"),
        pytest.param(changed(CODE_DIRECTORY + 37, 1), "does not use SHA-256", id="SHA-1"),
        pytest.param(changed(CODE_DIRECTORY + 35, 0), "does not cover the whole file", id="a shorter code directory"),
    ],
)
def test_a_library_that_macos_refuses_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "answer.dylib"
    path.write_bytes(data)
    with pytest.raises(BadDylib, match=re.escape(problem)):
        read_dylib(path)
