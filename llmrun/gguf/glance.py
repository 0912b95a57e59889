"""The first facts of a header, for a list of fifty models: no NumPy, no tensors, and no more bytes than it takes.

The keys that say what a model is stand before its vocabulary, in the first few kilobytes. A header is read no further
than that, unless something is missing by then. Whatever is read obeys the rules of header.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from llmrun.gguf.cursor import Cursor
from llmrun.gguf.format import ARRAY_ID, SCALAR_TYPES
from llmrun.gguf.header import read_array_start, read_counts, read_key, read_single
from llmrun.gguf.problems import HeaderTooLong, shown
from llmrun.gguf.source import FileSource

# As many as a header of 262,144 tokens has (Gemma 4: 16 MB), and half of that again. cursor.py takes more.
MOST_BYTES = 24 * 2**20
_STEP = 2**12
_LONG_ARRAY = 1024  # elements: a vocabulary begins
_MOST_TEXT = 300  # characters of a name that are kept

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
    file_type: str = ""  # "Q4_K_M"
    context: int = 0  # tokens the model was trained for


def glance(path: Path, *, needs_file_type: bool = True) -> Glance:
    """The facts that stand before the vocabulary; what is missing by then is looked for behind it.

    needs_file_type  False where the file's name has told it: programs that quantize put the key last, behind megabytes
                     of tokens

    Raises ModelNotFound, ModelFileError and BadGGUF, the last only for what was looked at.
    """
    missing = {"general.architecture", ".context_length"}
    if needs_file_type:
        missing.add("general.file_type")
    source = FileSource(path)
    seen: dict[str, object] = {}
    try:
        with contextlib.suppress(HeaderTooLong):  # what stands behind so many bytes is not worth the time of a list
            _read_facts(Cursor(source, path, window=_STEP, limit=MOST_BYTES), seen, missing)
    finally:
        source.close()
    named, file_type = seen.get("general.architecture"), seen.get("general.file_type")
    architecture = named[:_MOST_TEXT] if isinstance(named, str) else ""
    context = seen.get(f"{architecture}.context_length")
    return Glance(
        architecture,
        FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else "",
        context if isinstance(context, int) else 0,
    )


def _read_facts(cursor: Cursor, seen: dict[str, object], missing: set[str]) -> None:
    """Fill `seen` with the header's keys until nothing is missing."""
    counts = read_counts(cursor)
    for index in range(counts.keys):
        if not missing:
            return
        key = read_key(cursor, index, counts.keys, seen)
        where = shown(key)
        type_id = cursor.u32(where)
        if type_id == ARRAY_ID:
            element_id, n = read_array_start(cursor, where)
            # A model that says no length of context before its vocabulary says none behind it.
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
