"""Reads a few fields of a header, quickly enough to list fifty models. NumPy is not imported, and no tensors are read.

The keys that describe a model come before the vocabulary, in the first few kilobytes. Reading stops before the
vocabulary unless a key is still missing. All fields that are read are checked by the rules in header.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from llmrun.base.errors import shown
from llmrun.formats.gguf.cursor import Cursor
from llmrun.formats.gguf.format import ARRAY_ID, SCALAR_TYPES, HeaderTooLong
from llmrun.formats.gguf.header import read_array_start, read_counts, read_key, read_single
from llmrun.formats.gguf.quantization import is_exact, quantization_in, quantization_of
from llmrun.formats.gguf.source import FileSource

# The limit is 1.5 times the size of Gemma 4's header (16 MB, with 262,144 tokens). The limit in cursor.py is higher.
MOST_BYTES = 24 * 2**20
_STEP = 2**12
_LONG_ARRAY = 1024  # number of elements; any longer array is assumed to be the vocabulary
_MOST_TEXT = 300  # maximum number of characters; longer names are truncated


class Glance(NamedTuple):  # a dataclass would take 0.3 ms longer to define
    """A few fields of a header, and the quantization (see quantization.py). Missing fields are "" or 0."""

    architecture: str = ""
    quantization: str = ""  # "Q4_K_M"
    context: int = 0  # context length that the model was trained with, in tokens
    size_label: str = ""  # "135M", "30B-A3B"; empty if the key comes after the other fields


def glance(path: Path) -> Glance:
    """Read the fields before the vocabulary, and continue after the vocabulary if any fields are missing.

    If the file's name contains the quantization, `general.file_type` is not needed. Quantization tools write this key
    last, after megabytes of tokens.

    Raises ModelNotFound, ModelFileError and BadGGUF. Only the part of the header that was read is checked.
    """
    missing = {"general.architecture", ".context_length"}
    if not is_exact(quantization_of(path.name)):
        missing.add("general.file_type")
    source = FileSource(path)
    seen: dict[str, object] = {}
    try:
        with contextlib.suppress(HeaderTooLong):  # reading a longer header would make listing too slow
            _read_facts(Cursor(source, path, window=_STEP, limit=MOST_BYTES), seen, missing)
    finally:
        source.close()
    named = seen.get("general.architecture")
    architecture = named[:_MOST_TEXT] if isinstance(named, str) else ""
    context = seen.get(f"{architecture}.context_length")
    label = seen.get("general.size_label")
    return Glance(
        architecture,
        quantization_in(path.name, seen.get("general.file_type")),
        context if isinstance(context, int) else 0,
        label[:_MOST_TEXT] if isinstance(label, str) else "",
    )


def _read_facts(cursor: Cursor, seen: dict[str, object], missing: set[str]) -> None:
    """Add the header's keys and values to `seen` until no key in `missing` is left."""
    counts = read_counts(cursor)
    for index in range(counts.keys):
        if not missing:
            return
        key = read_key(cursor, index, counts.keys, seen)
        where = shown(key)
        type_id = cursor.u32(where)
        if type_id == ARRAY_ID:
            element_id, n = read_array_start(cursor, where)
            # A context length, if present, always precedes the vocabulary.
            if n > _LONG_ARRAY and missing <= {".context_length"}:
                return
            if element_id in SCALAR_TYPES:
                cursor.jump(cursor.position + n * SCALAR_TYPES[element_id].layout.size, _STEP)
            else:
                cursor.skip_strings(n, where)
            seen[key] = None
            continue
        seen[key], _ = read_single(cursor, type_id, where)
        missing.discard(key)
        if isinstance(seen[key], int):
            missing.discard(key[key.rfind(".") :])
