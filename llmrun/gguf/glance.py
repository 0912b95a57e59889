"""The first facts of a header, for a list of fifty models: no NumPy, no tensors, and no more bytes than it takes.

The keys that say what a model is stand before its vocabulary, in the first few kilobytes. A header is walked no further
than that, unless something is missing by then. The rules are those of header.py, as far as one looks.
"""

from __future__ import annotations

import struct
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from llmrun.errors import BadGGUF
from llmrun.gguf.format import (
    ARRAY_ID,
    MAX_ARRAY_ELEMENTS,
    MAX_KEY_BYTES,
    MAX_KEYS,
    SCALAR_TYPES,
    STRING_ID,
    magic_problem,
    version_problem,
)
from llmrun.gguf.opening import opened, opening
from llmrun.gguf.problems import bad_gguf, shown

# As many as a header of 262,144 tokens has (Gemma 4: 16 MB), and half of that again. cursor.py takes more.
MOST_BYTES = 24 * 2**20
_STEP = 2**14
_LONG_ARRAY = 1024  # elements: a vocabulary begins
_MOST_TEXT = 300  # characters of a value that are kept

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# llama.cpp's `enum llama_ftype`: what `general.file_type` says.
FILE_TYPES: dict[int, str] = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S"), 7)),
    **dict(enumerate(("Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL"), 17)),
    **dict(enumerate(("IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 26)),
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4"), 36)),
}


class Glance(NamedTuple):  # a dataclass would take a third of a millisecond more to make
    """What a header says of itself; "" and 0 where it does not."""

    architecture: str = ""
    name: str = ""
    size_label: str = ""  # "1.5B"
    file_type: str = ""  # "Q4_K_M"
    license: str = ""
    context: int = 0  # tokens the model was trained for


def glance(path: Path, *, needs_file_type: bool = True) -> Glance:
    """The facts that stand before the vocabulary; what is missing by then is looked for behind it.

    needs_file_type  False where the file's name has told it: programs that quantize put the key last, behind megabytes
                     of tokens

    Raises ModelNotFound, ModelFileError and BadGGUF, the last only for what was looked at.
    """
    with opening(path), opened(path) as file:
        return _Walk(file, path, needs_file_type).facts()


class _Walk:
    """A position in a header, and what has been read of it."""

    def __init__(self, file: FileIO, path: Path, needs_file_type: bool) -> None:
        self._file, self._path = file, path
        self._data = b""
        self._begin = 0  # where in the file _data begins
        self._at = 0  # in _data
        self._seen: dict[str, str | int] = {}
        self._missing = {"general.architecture", ".context_length"}
        if needs_file_type:
            self._missing.add("general.file_type")

    def facts(self) -> Glance:
        self._fill(32)
        if problem := magic_problem(self._data[:32]):
            raise self._bad("magic", problem)
        self._at = 4
        if problem := version_problem(self._u32("version")):
            raise self._bad("version", problem)
        self._u64("number of tensors")
        key_count = self._u64("number of keys")
        if key_count > MAX_KEYS:
            raise self._bad("number of keys", f"{key_count} seen, at most {MAX_KEYS} are read")
        for index in range(key_count):
            if not self._read_key(index):
                break
        architecture = self._text("general.architecture")
        return Glance(
            architecture,
            self._text("general.name"),
            self._text("general.size_label"),
            FILE_TYPES.get(self._number("general.file_type", -1), ""),
            self._text("general.license"),
            self._number(f"{architecture}.context_length", 0),
        )

    def _text(self, key: str) -> str:
        value = self._seen.get(key, "")
        return value if isinstance(value, str) else ""

    def _number(self, key: str, default: int) -> int:
        value = self._seen.get(key, default)
        return value if isinstance(value, int) else default

    def _read_key(self, index: int) -> bool:
        """Whether to go on behind this key: `general.` keys come first, and once an architecture's own have begun, only
        what is missing is waited for."""
        length = self._u64(f"name of key {index}")
        if not 0 < length <= MAX_KEY_BYTES:
            raise self._bad(f"name of key {index}", f"{length} bytes long, must be 1 to {MAX_KEY_BYTES}")
        key = self._take(length, f"name of key {index}").decode(errors="replace")
        if not self._missing and not key.startswith("general."):
            return False
        type_id = self._u32(key)
        if type_id == ARRAY_ID:
            return self._skip_array(key)
        if type_id == STRING_ID:
            self._keep_text(key, self._u64(key))
            return True
        scalar = SCALAR_TYPES.get(type_id)
        if scalar is None:
            raise self._bad(key, f"value type {type_id} seen, 0 to {max(SCALAR_TYPES)} are known")
        value = scalar.layout.unpack(self._take(scalar.layout.size, key))[0]
        if isinstance(value, int):
            self._seen[key] = value
            self._missing -= {key, key[key.rfind(".") :]}
        return True

    def _keep_text(self, key: str, length: int) -> None:
        kept = self._take(min(length, 4 * _MOST_TEXT), key)
        self._seen[key] = kept.decode(errors="replace")[:_MOST_TEXT]
        self._missing.discard(key)
        self._skip(length - len(kept), key)

    def _skip_array(self, key: str) -> bool:
        """Go behind an array, unless it is a long one and all that is looked for stood before it. A model that says no
        length of context says none behind its vocabulary."""
        type_id = self._u32(key)
        count = self._u64(key)
        if count > MAX_ARRAY_ELEMENTS:
            raise self._bad(key, f"{count} seen, at most {MAX_ARRAY_ELEMENTS} are read")
        if count > _LONG_ARRAY and self._missing <= {".context_length"}:
            return False
        if type_id == STRING_ID:
            return self._skip_strings(count, key)
        scalar = SCALAR_TYPES.get(type_id)
        if scalar is None:
            raise self._bad(key, f"array element type {type_id} seen, 0 to {max(SCALAR_TYPES)} are known")
        self._skip(count * scalar.layout.size, key)
        return True

    def _skip_strings(self, count: int, key: str) -> bool:
        """A string is its length and its bytes: each says where the next one is. 100 ns a string."""
        length_at, data, at = _U64.unpack_from, self._data, self._at
        while count:
            try:
                while count:
                    at += 8 + length_at(data, at)[0]
                    count -= 1
            except (struct.error, OverflowError):
                if self._begin + at + 8 > MOST_BYTES:
                    return False  # what stands behind so many strings is not worth the time of a list
                self._at = at
                self._require(8, key)
                data, at = self._data, self._at
        self._at = at
        return True

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack(self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack(self._take(8, what))[0]
        return value

    def _skip(self, n: int, what: str) -> None:
        """The bytes are not read, only known to be there."""
        self._at += n
        if self._at > len(self._data) and self._begin + self._at > self._file.seek(0, 2):
            raise self._bad(what, f"{n} bytes needed, the file ends before")

    def _take(self, n: int, what: str) -> bytes:
        if self._at + n > len(self._data):
            self._require(n, what)
        self._at += n
        return self._data[self._at - n : self._at]

    def _require(self, n: int, what: str) -> None:
        """Have the next n bytes in memory."""
        self._fill(n)
        if len(self._data) < n:
            raise self._bad(what, f"{n} bytes needed, {len(self._data)} bytes remain")

    def _fill(self, n: int) -> None:
        """Have what follows in memory: n bytes and some more, or as much as there is."""
        self._begin, self._at = self._begin + self._at, 0
        self._file.seek(min(self._begin, self._file.seek(0, 2)))  # a length may lead anywhere
        parts, left = [], max(n, _STEP)
        while left > 0 and (part := self._file.read(left)):
            parts.append(part)
            left -= len(part)
        self._data = b"".join(parts)

    def _bad(self, where: str, seen: str) -> BadGGUF:
        return bad_gguf(self._path, shown(where), seen)
