"""The header of a file that is somewhere else, of which as little is read as tells the rest.

Llama 3's vocabulary of 128,256 tokens makes 7.8 MB of header: 1 % of a 1B model's file. Most of it are the merges of
the tokenizer, whose strings tell nothing of the model's size or speed. So the arrays of numbers of the vocabulary are
stepped over, the end of the merges is looked for by probing, and the keys and the tensors' descriptions after it are
read.

The quantizations of one model share everything but a few keys: where the descriptions lie in one file, they lie near
in its siblings, which takes two reads.

What was stepped over has not been checked. What was read is believed only when it fits together to the byte: the number
of keys, of tensors, each tensor beginning where the one before it ends, and the last one ending with the file. A file
of which it does not is read from front to end, by the strict reader.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from llmrun.errors import BadGGUF
from llmrun.gguf.cursor import MAX_HEADER_BYTES, Cursor
from llmrun.gguf.format import ARRAY_ID, SCALAR_TYPES
from llmrun.gguf.header import Counts, Header, checked_header, read_array_start, read_counts, read_key, read_value
from llmrun.gguf.hyperparameters import check_hyperparameters
from llmrun.gguf.range_source import RangeSource
from llmrun.gguf.reader import GGUFFile, OpenShard, no_other, read_source
from llmrun.gguf.shards import COUNT
from llmrun.gguf.tensors import read_tensors
from llmrun.gguf.values import StringArray, Value
from llmrun.gguf.vocabulary import MERGES, SCORES, TOKEN_TYPES, TOKENS

STEPPED_OVER = frozenset({MERGES, SCORES, TOKEN_TYPES})  # keys that a header read in parts lacks
FIRST_WINDOW = 256 << 10  # a header with a small vocabulary is in it

_PROBE = 4 << 10
_NEAR = 64 << 10  # the search ends where no more than this is left to be read in one piece
_MOST_PROBES = 64
_IN_A_ROW = 12  # merges, one after the other, that are no accident
_LONGEST_MERGE = 1024  # bytes; real ones have up to 260
_ROOMY_MERGE_BYTES = 40

_HEAD = 16 << 10  # of a sibling: the keys before its vocabulary
_SLACK = 32 << 10  # siblings differ by a few keys: of the importance matrix, of who made them
_TRADED = ("general.", "quantize.")  # keys in which siblings may differ


class _NotInParts(Exception):
    """What was read does not fit together. The whole will tell why."""


def read_remote_header(source: RangeSource, open_shard: OpenShard = no_other) -> GGUFFile:
    """What the header says, without STEPPED_OVER where it is read in parts. Of a model in several files the headers are
    read whole: such a model is large beside them.

    Raises as `read_source` does, and what fetching raises.
    """
    try:
        return _read_in_parts(source)
    except (_NotInParts, BadGGUF):
        return read_source(source, source.path, open_shard)


def read_sibling_header(source: RangeSource, known: GGUFFile, open_shard: OpenShard = no_other) -> GGUFFile:
    """The header of another quantization of the model that `known` is of: its metadata, but for keys that this file
    begins with, and this file's tensors. What does not look like one is read by `read_remote_header`. Raises as that
    does."""
    try:
        return _read_as_sibling(source, known)
    except (_NotInParts, BadGGUF):
        return read_remote_header(source, open_shard)


def _opened(source: RangeSource, cursor: Cursor, header: Header) -> GGUFFile:
    """With its tensors, from where the cursor is; they must fill the file to its end, but for its last padding."""
    file = GGUFFile(source.path, source, header, read_tensors(cursor, header))
    end = max((tensor.offset + tensor.nbytes for tensor in file.tensors.values()), default=cursor.position)
    if not end <= source.size < end + header.alignment:
        raise _NotInParts
    check_hyperparameters(file)
    return file


# --- one file alone ---------------------------------------------------------------------------------------------------


def _read_in_parts(source: RangeSource) -> GGUFFile:
    cursor = Cursor(source, source.path, window=FIRST_WINDOW)
    counts = read_counts(cursor)
    metadata: dict[str, Value] = {}
    types: dict[str, str] = {}
    for index in range(counts.keys):
        key = read_key(cursor, index, counts.keys, types)
        if key in STEPPED_OVER:
            types[key] = _step_over(cursor, source, key, metadata.get(TOKENS))
        else:
            metadata[key], types[key] = read_value(cursor, key)
    if COUNT in metadata:
        raise _NotInParts
    return _opened(source, cursor, checked_header(cursor, counts, metadata, types))


def _step_over(cursor: Cursor, source: RangeSource, key: str, tokens: Value | None) -> str:
    """Go to where an array ends; returns its type. Its bytes are read only as far as a window holds them anyway."""
    if cursor.u32(key) != ARRAY_ID:
        raise _NotInParts
    type_id, n = read_array_start(cursor, key)
    if type_id in SCALAR_TYPES:
        cursor.jump(cursor.position + n * SCALAR_TYPES[type_id].layout.size, _PROBE)
        return f"arr[{SCALAR_TYPES[type_id].name}]"
    if key != MERGES:
        raise _NotInParts
    _step_over_merges(cursor, source, n, tokens)
    return "arr[str]"


def _step_over_merges(cursor: Cursor, source: RangeSource, n: int, tokens: Value | None) -> None:
    """Go to what follows n merges, whose bytes are told by no field: somewhere behind `inside`, before `outside`."""
    if n * _ROOMY_MERGE_BYTES <= _NEAR:
        for _ in range(n):
            cursor.text(MERGES)
        return
    inside, outside = cursor.position, min(source.size, MAX_HEADER_BYTES)
    # A merge is a token with a space in it. Those of long tokens are more: each can be put together in several ways.
    average = float(np.mean(tokens.lengths)) if isinstance(tokens, StringArray) and len(tokens) else 8.0
    step = n * 3
    probe = inside + int(n * (9 + average))
    for _ in range(_MOST_PROBES):
        if outside - inside <= _NEAR:
            break
        if not inside < probe < outside:
            probe = (inside + outside) // 2
        data = bytearray(min(_PROBE, source.size - probe))
        source.read(probe, memoryview(data))
        found = _merges_in(bytes(data))
        if found is None:
            outside = probe
            probe = (inside + outside) // 2
        else:
            inside = probe + found
            probe = inside + step  # until one is outside, in growing steps
            step *= 2
    _read_to_the_end_of_merges(cursor, inside, n)


def _merges_in(data: bytes) -> int | None:
    """Where in these bytes of a file merges begin to follow each other; None where they do not."""
    starts = (at for at in range(min(len(data), 8 + _LONGEST_MERGE)) if data[at + 2 : at + 8] == bytes(6))
    return next((at for at in starts if _are_merges(data, at)), None)


def _are_merges(data: bytes, at: int) -> bool:
    for _ in range(_IN_A_ROW):
        length = int.from_bytes(data[at : at + 8], "little")
        if length > _LONGEST_MERGE or not _is_merge(data[at + 8 : at + 8 + length]):
            return False
        at += 8 + length
    return at <= len(data)


def _is_merge(text: bytes) -> bool:
    """Two strings with a space between, the left of which may begin with one. No name of a key or a tensor is that."""
    return 0 < text.find(b" ", 1) < len(text) - 1


def _read_to_the_end_of_merges(cursor: Cursor, position: int, most: int) -> None:
    cursor.jump(position, 2 * _NEAR)
    for _ in range(most + 1):
        before = cursor.position
        if not _is_merge(cursor.text(MERGES)):
            cursor.position = before
            return
    raise _NotInParts


# --- its siblings -----------------------------------------------------------------------------------------------------


def _read_as_sibling(source: RangeSource, known: GGUFFile) -> GGUFFile:
    cursor = Cursor(source, source.path, window=_HEAD)
    counts = read_counts(cursor)
    metadata, types = _keys_before_the_vocabulary(cursor, counts)
    _check_equal(metadata, known)
    if counts.tensors != len(known.tensors):
        raise _NotInParts
    shared = {key: value for key, value in known.metadata.items() if not key.startswith("quantize.")}
    header = checked_header(cursor, counts, shared | metadata, {**known.types, **types})
    _go_to_the_first_tensor(cursor, known)
    file = _opened(source, cursor, header)
    if _shapes(file) != _shapes(known):
        raise _NotInParts
    return file


def _keys_before_the_vocabulary(cursor: Cursor, counts: Counts) -> tuple[dict[str, Value], dict[str, str]]:
    metadata: dict[str, Value] = {}
    types: dict[str, str] = {}
    for index in range(counts.keys):
        key = read_key(cursor, index, counts.keys, types)
        if key == TOKENS or key in STEPPED_OVER:
            return metadata, types
        metadata[key], types[key] = read_value(cursor, key)
    raise _NotInParts  # all of it has been read: nothing is to be saved


def _check_equal(metadata: Mapping[str, Value], known: GGUFFile) -> None:
    for key, value in metadata.items():
        if key.startswith(_TRADED) and key != "general.architecture":
            continue
        other = known.metadata.get(key)
        if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
            equal = np.array_equal(value, other)
        else:
            equal = not isinstance(value, np.ndarray | StringArray) and value == other
        if not equal:
            raise _NotInParts


def _go_to_the_first_tensor(cursor: Cursor, known: GGUFFile) -> None:
    """To the first name of a tensor, in whatever order this file has them, near to where the known file has its own."""
    if not known.tensors:
        raise _NotInParts
    entries = [struct.pack("<Q", len(name.encode())) + name.encode() for name in known.tensors]
    described = sum(len(entry) for entry in entries)
    described += sum(4 + 8 * len(tensor.shape) + 4 + 8 for tensor in known.tensors.values())
    data_start = min(tensor.offset for tensor in known.tensors.values())
    begin = max(cursor.position, data_start - known.alignment - described - _SLACK)
    near = bytes(cursor.jump(begin, described + known.alignment + 2 * _SLACK))
    found = [at for at in map(near.find, entries) if at >= 0]
    if not found:
        raise _NotInParts
    cursor.position = begin + min(found)


def _shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in file.tensors.items()}
