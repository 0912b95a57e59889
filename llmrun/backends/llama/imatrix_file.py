"""Importance matrices (imatrix) in llama.cpp's formats: GGUF, and an older format, usually with the suffix .dat.

For each matrix, a file contains the sum of the squares of every input, and the number of rows that were added. In a
mixture of experts, each expert has its own sums and count. The GGUF form contains these keys and tensors:

    general.type            "imatrix"
    imatrix.datasets        the files from which the matrix was computed
    imatrix.chunk_count     the number of chunks
    imatrix.chunk_size      tokens in a chunk
    NAME.in_sum2            f32[matrices, inputs]
    NAME.counts             f32[matrices, 1], or a single number for all matrices

The older form contains, for each matrix, `ncall` (the number of chunks) and the means of the squares times `ncall`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmrun.base.errors import ModelFileError, shown
from llmrun.formats.gguf.cursor import Cursor
from llmrun.formats.gguf.format import MAGIC
from llmrun.formats.gguf.header import read_header
from llmrun.formats.gguf.reader import GGUFFile
from llmrun.formats.gguf.source import FileSource, opened, opening
from llmrun.formats.gguf.tensors import TensorInfo, read_tensors
from llmrun.formats.gguf.writer import NewTensor, NewValue, write_gguf
from llmrun.formats.quants.registry import BY_NAME

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNKS, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_INT = struct.Struct("<i")
_HINT = "compute one: llmrun imatrix MODEL -f TEXT -o FILE"


@dataclass(frozen=True, slots=True)
class Entry:
    """The squared inputs of a matrix.

    sums    float32[matrices * inputs]
    counts  float32[matrices], or float32[1] if all matrices read the same rows
    """

    sums: NDArray[np.float32]
    counts: NDArray[np.float32]

    def means(self) -> NDArray[np.float32]:
        """Return the mean of the squares of each input, or 1 for experts that no row was routed to."""
        sums, counts = self.sums.reshape(len(self.counts), -1), self.counts[:, None]
        return np.where(counts > 0, sums / np.where(counts > 0, counts, np.float32(1)), np.float32(1)).reshape(-1)


@dataclass(frozen=True, slots=True)
class Imatrix:
    """An importance matrix. The keys of `entries` are the names of tensors, in order."""

    entries: Mapping[str, Entry]
    datasets: tuple[str, ...]
    chunks: int
    chunk_size: int = 0  # tokens per chunk; 0 in the older form

    def means(self) -> dict[str, NDArray[np.float32]]:
        return {name: entry.means() for name, entry in self.entries.items()}


def write_imatrix(file: BinaryIO, measured: Imatrix) -> None:
    """Write the GGUF form. Tensors are sorted by name, as in llama-imatrix. Raises OSError."""
    tensors: list[NewTensor] = []
    for name in sorted(measured.entries):
        entry = measured.entries[name]
        matrices = len(entry.counts)
        many = (matrices,) if matrices > 1 else ()  # ggml drops trailing dimensions of 1
        tensors.append(_new_tensor(name + _SUMS, (len(entry.sums) // matrices, *many), entry.sums))
        tensors.append(_new_tensor(name + _COUNTS, (1, *many), entry.counts))
    metadata: dict[str, NewValue] = {
        "general.type": "imatrix",
        _DATASETS: list(measured.datasets),
        _CHUNKS: measured.chunks,
        _CHUNK_SIZE: measured.chunk_size,
    }
    write_gguf(file, metadata, tensors)


def _new_tensor(name: str, shape: tuple[int, ...], values: NDArray[np.float32]) -> NewTensor:
    return NewTensor(name, BY_NAME["F32"], shape, lambda: [values.astype("<f4")])


def read_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix of either form.

    Raises ModelNotFound, and ModelFileError if the file is damaged, has another format, or contains numbers that are
    negative or not finite.
    """
    with opening(path, "importance matrix"), opened(path) as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    found = _read_gguf(path) if is_gguf else _read_older(path)
    if not found.entries:
        raise _bad(path, "it has no entries")
    for name, entry in found.entries.items():
        for numbers in (entry.sums, entry.counts):
            if not (np.isfinite(numbers) & (numbers >= 0)).all():
                raise _bad(path, f"{shown(name)}: it has numbers that are negative or not finite")
    return found


def _bad(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"not an importance matrix: {shown(str(path), 300)}: {why}", hint=_HINT)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _read_gguf(path: Path) -> Imatrix:
    with closing(FileSource(path)) as source:
        cursor = Cursor(source, path)
        header = read_header(cursor)
        file = GGUFFile(path, source, header, read_tensors(cursor, header))
        if (kind := file.string("general.type", "")) != "imatrix":
            raise _bad(path, "this is a model" if kind in ("", "model") else f"general.type is '{shown(kind)}'")
        datasets = tuple(file.strings(_DATASETS))
        chunks, chunk_size = file.integer(_CHUNKS, minimum=0), file.integer(_CHUNK_SIZE, minimum=0)
        names = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
        return Imatrix({name: _entry(file, name) for name in names}, datasets, chunks, chunk_size)


def _entry(file: GGUFFile, name: str) -> Entry:
    sums, counts = (_floats(file, file.tensors.get(name + suffix), name) for suffix in (_SUMS, _COUNTS))
    if len(sums) % len(counts):
        raise _bad(file.path, f"{shown(name)}: {len(sums):,} sums cannot be divided among {len(counts):,} counts")
    return Entry(sums, np.rint(counts))


def _floats(file: GGUFFile, tensor: TensorInfo | None, name: str) -> NDArray[np.float32]:
    if tensor is None:
        raise _bad(file.path, f"{shown(name)}: its counts are missing")
    if tensor.type.name != "F32":
        raise _bad(file.path, f"{shown(tensor.name)}: must be F32, not {tensor.type.name}")
    return file.read(tensor).view("<f4")


# --- the older form ---------------------------------------------------------------------------------------------------


def _read_older(path: Path) -> Imatrix:
    with opening(path, "importance matrix"), opened(path) as file:
        size = path.stat().st_size
        entries = {}
        for _ in range(_count(path, file, size)):
            name = _text(path, file, size)
            (calls,) = _INT.unpack(_exactly(path, file, _INT.size))
            count = _count(path, file, size)
            sums = np.frombuffer(_exactly(path, file, 4 * count), "<f4")
            entries[name] = Entry(sums, np.array([max(1, calls)], np.float32))
        if file.tell() == size:  # the oldest files contain no further fields
            return Imatrix(entries, (), 0)
        (chunks,) = _INT.unpack(_exactly(path, file, _INT.size))
        return Imatrix(entries, (_text(path, file, size),), max(0, chunks))


def _count(path: Path, file: IO[bytes], size: int) -> int:
    """Read a count, which must not exceed the size of the file."""
    (count,) = _INT.unpack(_exactly(path, file, _INT.size))
    at = file.tell() - _INT.size
    if not 0 < count <= size and at == 0:
        raise _bad(path, "it has neither of llama.cpp's formats")
    if not 0 < count <= size:
        raise _bad(path, f"{count:,} at byte {at:,} must be 1 to {size:,}, the size of the file")
    return int(count)


def _text(path: Path, file: IO[bytes], size: int) -> str:
    return _exactly(path, file, _count(path, file, size)).decode(errors="surrogateescape")


def _exactly(path: Path, file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise _bad(path, f"it is cut off at byte {file.tell():,}")
    return data
