"""Random mutations of valid GGUF files that target known field positions.

A seed and a case number always give the same bytes, so these two numbers are enough to reproduce a failure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from llmrun.base.errors import ModelFileError, ModelNotFound
from llmrun.formats.gguf.metadata import StringArray
from llmrun.formats.gguf.reader import GGUFFile
from tests.support.gguf import gguf_bytes, gguf_shards
from tests.support.gguf.gguf_bytes import ARRAY, CODES, STRING, RawGGUF, RawTensor
from tests.support.gguf.gguf_memory import read_gguf

INTERESTING = (
    *(0, 1, 2, 3, 7, 8, 9, 12, 13, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256),
    *(2**15, 2**16 - 1, 2**16, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**56),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1),
)
TEXTS = (
    b"",
    b"\0",
    b"a\0b",
    b"\xff",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    "\u202e".encode(),
    b" ",
    b"a b",
    b"[EMPTY_2]",
    b"k" * 70,
)


@dataclass(frozen=True)
class Span:
    """The byte range of one field."""

    start: int
    end: int


@dataclass
class Layout:
    """A valid file and the positions of its fields."""

    data: bytes
    integers: list[Span] = field(default_factory=list)  # 2, 4 or 8 bytes: counts, lengths, types, dimensions, offsets
    texts: list[Span] = field(default_factory=list)  # strings without their lengths
    keys: list[Span] = field(default_factory=list)  # names with their values
    tensors: list[Span] = field(default_factory=list)  # tensor descriptions
    header_end: int = 0


TENSOR_COUNT, KEY_COUNT = Span(8, 16), Span(16, 24)


def layout_of(data: bytes) -> Layout:
    """Parse a valid file and record the position of every field."""
    layout = Layout(data, [Span(4, 8), TENSOR_COUNT, KEY_COUNT])
    position = 24
    for _ in range(_integer(data, KEY_COUNT)):
        start, position = position, _walk_text(layout, position)
        position = _walk_value(layout, position)
        layout.keys.append(Span(start, position))
    for _ in range(_integer(data, TENSOR_COUNT)):
        start, position = position, _walk_text(layout, position)
        dimensions = Span(position, position + 4)
        sizes = [8] * _integer(data, dimensions) + [4, 8]
        layout.integers.append(dimensions)
        position = dimensions.end
        for size in sizes:
            layout.integers.append(Span(position, position + size))
            position += size
        layout.tensors.append(Span(start, position))
    layout.header_end = position
    return layout


def _integer(data: bytes | bytearray, span: Span) -> int:
    return int.from_bytes(data[span.start : span.end], "little")


def _walk_text(layout: Layout, position: int) -> int:
    length = Span(position, position + 8)
    layout.integers.append(length)
    layout.texts.append(Span(length.end, length.end + _integer(layout.data, length)))
    return layout.texts[-1].end


def _walk_value(layout: Layout, position: int) -> int:
    layout.integers.append(Span(position, position + 4))
    type_id = _integer(layout.data, layout.integers[-1])
    if type_id != ARRAY:
        return _walk_element(layout, position + 4, type_id)
    element, count = Span(position + 4, position + 8), Span(position + 8, position + 16)
    layout.integers += [element, count]
    position = count.end
    for _ in range(_integer(layout.data, count)):
        position = _walk_element(layout, position, _integer(layout.data, element))
    return position


def _walk_element(layout: Layout, position: int, type_id: int) -> int:
    if type_id == STRING:
        return _walk_text(layout, position)
    size = struct.calcsize("<" + CODES[type_id])
    if size >= 2:
        layout.integers.append(Span(position, position + size))
    return position + size


# Mutations in place, which keep the file's length.


def _set_integer(random: Random, layout: Layout, data: bytearray) -> None:
    span = random.choice(layout.integers)
    size = span.end - span.start
    seen = _integer(data, span)
    near = (seen - 1, seen + 1, seen ^ 1 << random.randrange(8 * size), seen * 2, len(data) - span.end)
    value = random.choice(INTERESTING) if random.random() < 0.5 else random.choice(near)
    data[span.start : span.end] = (value % 2 ** (8 * size)).to_bytes(size, "little")


def _flip_bit(random: Random, layout: Layout, data: bytearray) -> None:
    data[random.randrange(layout.header_end)] ^= 1 << random.randrange(8)


def _set_byte(random: Random, layout: Layout, data: bytearray) -> None:
    data[random.randrange(layout.header_end)] = random.randrange(256)


def _exchange(random: Random, layout: Layout, data: bytearray) -> None:
    a, b = random.choice(layout.integers), random.choice(layout.integers)
    if a.end - a.start == b.end - b.start:
        data[a.start : a.end], data[b.start : b.end] = data[b.start : b.end], data[a.start : a.end]


# Mutations that add, remove or resize fields. Most of them correct the affected lengths and counts.


def _change_text(random: Random, layout: Layout, data: bytearray) -> None:
    span = random.choice(layout.texts)
    other = random.choice(layout.texts)
    value = random.choice(TEXTS) if random.random() < 0.5 else layout.data[other.start : other.end]
    data[span.start - 8 : span.end] = gguf_bytes.text(value)


def _repeat_record(random: Random, layout: Layout, data: bytearray) -> None:
    records, count = random.choice(((layout.keys, KEY_COUNT), (layout.tensors, TENSOR_COUNT)))
    record, place = random.choice(records), random.choice(records)
    data[place.start : place.start] = layout.data[record.start : record.end]
    _add_to_count(random, data, count, 1)


def _drop_record(random: Random, layout: Layout, data: bytearray) -> None:
    records, count = random.choice(((layout.keys, KEY_COUNT), (layout.tensors, TENSOR_COUNT)))
    record = random.choice(records)
    del data[record.start : record.end]
    _add_to_count(random, data, count, -1)


def _exchange_records(random: Random, layout: Layout, data: bytearray) -> None:
    records = random.choice((layout.keys, layout.tensors))
    first, second = sorted(random.sample(records, 2), key=lambda record: record.start)
    head, tail = layout.data[first.start : first.end], layout.data[second.start : second.end]
    data[first.start : second.end] = tail + data[first.end : second.start] + head


def _add_to_count(random: Random, data: bytearray, count: Span, difference: int) -> None:
    if random.random() < 0.8:
        value = (_integer(data, count) + difference) % 2**64
        data[count.start : count.end] = value.to_bytes(8, "little")


def _cut_off(random: Random, layout: Layout, data: bytearray) -> None:
    del data[random.randrange(len(data)) :]


def _cut_out(random: Random, layout: Layout, data: bytearray) -> None:
    span = random.choice(layout.integers + layout.texts)
    del data[span.start : span.end]


def _put_in(random: Random, layout: Layout, data: bytearray) -> None:
    span = random.choice(layout.integers + layout.texts)
    data[span.start : span.start] = random.randbytes(random.choice((1, 4, 8, 32)))


Change = Callable[[Random, Layout, bytearray], None]

IN_PLACE: tuple[Change, ...] = (_set_integer, _set_integer, _set_integer, _flip_bit, _set_byte, _exchange)
OF_PARTS: tuple[Change, ...] = (
    *(_change_text, _change_text, _repeat_record, _drop_record, _exchange_records),
    *(_cut_off, _cut_out, _put_in),
)


def base_files() -> list[Layout]:
    """Return the valid files to mutate, smallest first.

    Each has spare bytes at the end, so that an added record does not always lead to the same "truncated file" error.
    """
    small = RawGGUF(
        {
            "general.architecture": gguf_bytes.string("llama"),
            "general.alignment": gguf_bytes.scalar(gguf_bytes.U32, 32),
        },
        [RawTensor("a"), RawTensor("b", 2, (32, 2), 36), RawTensor("c", 14, (256,), 210)],
    )
    spm = RawGGUF(gguf_bytes.spm_vocabulary(), [RawTensor("a"), RawTensor("b")])
    return [layout_of(raw.build() + bytes(4096)) for raw in (small, gguf_bytes.whole_file(), spm)]


def mutant(bases: list[Layout], seed: int, case: int) -> bytes:
    """Return case `case` of `seed`: one of the files with one to four mutations."""
    random = Random(seed << 40 | case)
    return broken(random, random.choices(bases, weights=(5, 12, 1))[0])


def broken(random: Random, layout: Layout) -> bytes:
    """Return the file with one to four random mutations."""
    data = bytearray(layout.data)
    if random.random() < 0.6:
        for _ in range(random.choice((1, 1, 2, 3))):
            random.choice(IN_PLACE)(random, layout, data)
    if random.random() < 0.5 or data == layout.data:
        random.choice(OF_PARTS)(random, layout, data)
    return bytes(data)


def shard_bases() -> list[Layout]:
    """Return the files of one valid split model, in order, with spare bytes at the end."""
    return [layout_of(data + bytes(1024)) for data in gguf_shards.built(gguf_shards.raw_shards()).values()]


def shard_mutant(bases: list[Layout], seed: int, case: int) -> dict[str, bytes]:
    """Return case `case` of `seed`: the model's files by name, with one or two mutated, missing or swapped."""
    random = Random(seed << 40 | case)
    parts = [base.data for base in bases]
    for index in random.sample(range(len(bases)), random.choice((1, 1, 2))):
        parts[index] = broken(random, bases[index])
    if random.random() < 0.1:
        a, b = random.sample(range(len(bases)), 2)
        parts[a], parts[b] = parts[b], parts[a]
    files = {gguf_shards.name_of(number): part for number, part in enumerate(parts)}
    if random.random() < 0.05:
        del files[gguf_shards.name_of(random.randrange(1, len(bases)))]
    return files


def outcome(data: bytes) -> str:
    """Return how reading ends: the name of a ModelFileError, or "opened" if the whole file could be used.

    Any other exception is a bug in the reader and propagates.
    """
    return _outcome(lambda: read_gguf(data, Path("mutant.gguf")))


def outcome_of_shards(files: Mapping[str, bytes]) -> str:
    """Return the outcome for a split model that may lack some of its files."""
    try:
        return _outcome(lambda: gguf_shards.read_shards(files))
    except ModelNotFound:
        return "ModelNotFound"


def _outcome(read: Callable[[], GGUFFile]) -> str:
    try:
        file = read()
    except ModelFileError as error:
        refused = error
    else:
        use(file)
        return "opened"
    assert str(refused).isprintable(), str(refused)
    return type(refused).__name__


def use(file: GGUFFile) -> None:
    """Use an open file as a backend does. Raises AssertionError if the file breaks the reader's guarantees."""
    end = 0
    for tensor in file.tensors.values():
        assert tensor.offset >= end
        assert file.read(tensor).nbytes == tensor.nbytes == tensor.type.row_bytes(tensor.shape[0]) * tensor.n_rows
        end = tensor.offset + tensor.nbytes
    assert end <= file.file_bytes
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            assert all(len(value.raw(i)) == value.lengths[i] for i in range(len(value)))
            assert all(isinstance(text, str) for text in value)
        elif isinstance(value, np.ndarray):
            assert len(value.tolist()) == value.size
    file.close()
