"""Reads the header of a remote file with as little traffic as possible.

Llama 3's vocabulary of 128,256 tokens makes the header 7.8 MB long, 1 % of a 1B model's file. Most of the
header is the tokenizer's merges, which do not affect the model's size or speed. The reader therefore skips the
vocabulary's numeric arrays, finds the end of the merges by probing, and reads the keys and tensor descriptions after
the merges.

All quantizations of a model have the same header except for a few keys. Once the position of the tensor descriptions
in one file is known, two reads are enough to find the tensor descriptions near the same position in sibling files.

The skipped parts are not checked. The rest of the header is trusted only if it is consistent to the byte: the key and
tensor counts must match, each tensor must start where the previous one ends, and the last tensor must end at the end of
the file. Otherwise, the strict reader reads the whole header.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.cursor import MAX_HEADER_BYTES, Cursor
from llmrun.formats.gguf.format import ARRAY_ID, SCALAR_TYPES
from llmrun.formats.gguf.header import (
    Counts,
    Header,
    checked_header,
    read_array_start,
    read_counts,
    read_key,
    read_value,
)
from llmrun.formats.gguf.metadata import COUNT, StringArray, Value, check_hyperparameters
from llmrun.formats.gguf.reader import GGUFFile, OpenShard, no_other, read_source
from llmrun.formats.gguf.source import RangeSource
from llmrun.formats.gguf.tensors import read_tensors
from llmrun.formats.gguf.vocabulary import MERGES, SCORES, TOKEN_TYPES, TOKENS

STEPPED_OVER = frozenset({MERGES, SCORES, TOKEN_TYPES})  # these keys are missing from a partially read header
FIRST_WINDOW = 256 << 10  # number of bytes, which is enough for a header with a small vocabulary

_PROBE = 4 << 10
_NEAR = 64 << 10  # number of bytes; the search stops when the range is this small, and one read fetches the range
_MOST_PROBES = 64
_IN_A_ROW = 12  # this many consecutive merges are unlikely to be a coincidence
_LONGEST_MERGE = 1024  # bytes; the longest merge in real files is 260 bytes long
_ROOMY_MERGE_BYTES = 40

_HEAD = 16 << 10  # number of bytes, which is enough for the keys before a sibling's vocabulary
_SLACK = 32 << 10  # number of bytes; siblings differ in a few keys, such as the author and the importance matrix
_VARYING = ("general.", "quantize.")  # prefixes of keys that may differ between siblings


class _NotInParts(Exception):
    """The partially read header is inconsistent or unsuitable, so the whole header must be read."""


def read_remote_header(source: RangeSource, open_shard: OpenShard = no_other) -> GGUFFile:
    """Read the header of a remote file, skipping the vocabulary if possible.

    A partially read header lacks the keys in STEPPED_OVER. The headers of split models are always read in full because
    they are small compared with the model.

    Raises the same errors as `read_source` and the source's fetch function.
    """
    try:
        return _read_in_parts(source)
    except (_NotInParts, BadGGUF):
        return read_source(source, source.path, open_shard)


def read_sibling_header(source: RangeSource, known: GGUFFile, open_shard: OpenShard = no_other) -> GGUFFile:
    """Read the header of another quantization of the model `known`.

    The tensors and the keys before the vocabulary come from this file, and all other metadata comes from `known`.
    Falls back to `read_remote_header` if the file does not look like a sibling, and raises the same errors.
    """
    try:
        return _read_as_sibling(source, known)
    except (_NotInParts, BadGGUF):
        return read_remote_header(source, open_shard)


def _opened(source: RangeSource, cursor: Cursor, header: Header) -> GGUFFile:
    """Read the tensor descriptions at the cursor and return the file.

    Raises _NotInParts unless the tensors, including padding, fill the rest of the file exactly.
    """
    file = GGUFFile(source.path, source, header, read_tensors(cursor, header))
    end = max((tensor.offset + tensor.nbytes for tensor in file.tensors.values()), default=cursor.position)
    if not end <= source.size < end + header.alignment:
        raise _NotInParts
    check_hyperparameters(file)
    return file


# --- a single file ----------------------------------------------------------------------------------------------------


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
    """Skip an array without fetching its unread bytes, and return the name of its type."""
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
    """Skip n merges.

    The file does not contain the size of the merges in bytes. A search with growing steps, followed by bisection, finds
    the end: `inside` is a position within the merges, and `outside` is a position after the merges.
    """
    if n * _ROOMY_MERGE_BYTES <= _NEAR:
        for _ in range(n):
            cursor.text(MERGES)
        return
    inside, outside = cursor.position, min(source.size, MAX_HEADER_BYTES)
    # A merge is a token with a space inserted. Long tokens have more merges because they can be split in several ways.
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
            probe = inside + step  # the step size grows until a probe is past the end of the merges
            step *= 2
    _read_to_the_end_of_merges(cursor, inside, n)


def _merges_in(data: bytes) -> int | None:
    """Return the index in `data` where a run of merges begins, or None if `data` contains no run."""
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
    """Return True if `text` is two strings separated by a space.

    The left string may begin with a space. Keys and tensor names never have this form.
    """
    return 0 < text.find(b" ", 1) < len(text) - 1


def _read_to_the_end_of_merges(cursor: Cursor, position: int, most: int) -> None:
    cursor.jump(position, 2 * _NEAR)
    for _ in range(most + 1):
        before = cursor.position
        if not _is_merge(cursor.text(MERGES)):
            cursor.position = before
            return
    raise _NotInParts


# --- siblings ---------------------------------------------------------------------------------------------------------


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
    raise _NotInParts  # without a vocabulary, there is nothing to skip


def _check_equal(metadata: Mapping[str, Value], known: GGUFFile) -> None:
    for key, value in metadata.items():
        if key.startswith(_VARYING) and key != "general.architecture":
            continue
        other = known.metadata.get(key)
        if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
            equal = np.array_equal(value, other)
        else:
            equal = not isinstance(value, np.ndarray | StringArray) and value == other
        if not equal:
            raise _NotInParts


def _go_to_the_first_tensor(cursor: Cursor, known: GGUFFile) -> None:
    """Move to the first tensor description, which is near its position in the known file.

    The two files may order their tensors differently.
    """
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
