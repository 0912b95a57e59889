"""Opens GGUF files. The whole header is checked. Tensors are read on demand, not memory-mapped.

This module and the architectures' modules check everything that backends rely on, so a file that opens cannot crash a
backend. llama.cpp is less strict and aborts on some of the files that it accepts.

A sampled digest identifies a model without reading all of its bytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Container
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from llmrun.base.errors import BadGGUF, ModelNotFound, shown
from llmrun.formats.gguf.cursor import Cursor
from llmrun.formats.gguf.header import Header, read_header
from llmrun.formats.gguf.metadata import TENSORS, Metadata, Split, check_hyperparameters, check_shard, read_split
from llmrun.formats.gguf.source import FileSource, JoinedSource, RangeSource, Source
from llmrun.formats.gguf.tensors import TensorInfo, read_tensors
from llmrun.formats.gguf.vocabulary import check_vocabulary

OpenShard = Callable[[str], Source]  # opens a file in the first shard's folder by name; raises ModelNotFound


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a model from its file, or from its first shard (see metadata.py), and check its headers.

    Tensors are read on demand.

    Raises ModelNotFound if the file or a shard does not exist, BadGGUF if the file breaks a rule of the format, and
    ModelFileError if the file cannot be read, is being written to, or is not the first shard.
    """
    began, path = time.perf_counter(), Path(path)
    file = read_source(FileSource(path), path, lambda name: FileSource(path.with_name(name)))
    file.read_s = time.perf_counter() - began
    return file


def read_source(source: Source, path: Path, open_shard: OpenShard) -> GGUFFile:
    """Open a model from any source and check it. Raises the same errors as `open_gguf`.

    source      the first file, which is closed with the GGUFFile, or on failure
    path        the path of the first file, used in error messages and to find the other shards
    open_shard  opens another shard
    """
    with ExitStack() as on_failure:
        on_failure.callback(source.close)
        try:
            first = read_whole_header(Cursor(source, path), source)
        except BadGGUF:
            source.check_unchanged()  # a file that is still being copied is reported as changed, not as invalid
            raise
        file = with_shards(first, open_shard)
        on_failure.pop_all()
        return file


def read_whole_header(cursor: Cursor, source: Source) -> GGUFFile:
    """Read and check everything before the tensor data of one file. Raises BadGGUF."""
    header = read_header(cursor)
    file = GGUFFile(cursor.path, source, header, read_tensors(cursor, header))
    check_hyperparameters(file)
    if file.has("tokenizer.ggml.tokens"):
        check_vocabulary(file)
    return file


def with_shards(first: GGUFFile, open_shard: OpenShard) -> GGUFFile:
    """Open the other shards of a model and return the whole model, with the tensors of all shards.

    Returns `first` itself if the model is not split. Closing the returned model closes all shards. A failure also
    closes all shards. Raises the same errors as `open_gguf`.
    """
    joined = JoinedSource()
    joined.append(first._source)
    tensors = dict(first.tensors)
    with ExitStack() as on_failure:
        on_failure.callback(joined.close)
        try:
            split = read_split(first)
            if split is None:
                on_failure.pop_all()
                return first
            for number, name in enumerate(split.other_names, 1):
                path = first.path.with_name(name)
                source = _open(open_shard, path, number, split)
                begin = joined.append(source)
                shard = read_whole_header(Cursor(source, path), source)
                check_shard(shard, number, split, first)
                tensors |= _behind(shard, begin, tensors)
            if len(tensors) != split.tensors:
                found = f"{len(tensors)}, the number of tensors in all {split.count} files"
                raise first.bad(TENSORS, f"must be {found}, not {split.tensors}")
        except BadGGUF:
            joined.check_unchanged()
            raise
        on_failure.pop_all()
    header = Header(first.version, first.alignment, len(tensors), dict(first.metadata), dict(first.types))
    return GGUFFile(first.path, joined, header, tensors)


def _behind(shard: GGUFFile, begin: int, before: Container[str]) -> dict[str, TensorInfo]:
    """Return a shard's tensors with offsets into the joined source, in which the shard starts at `begin`."""
    for name in shard.tensors:
        if name in before:
            raise shard.bad(name, "an earlier file of the model already has a tensor of this name")
    return {name: replace(tensor, offset=begin + tensor.offset) for name, tensor in shard.tensors.items()}


def _open(open_shard: OpenShard, path: Path, number: int, split: Split) -> Source:
    try:
        return open_shard(path.name)
    except ModelNotFound as missing:
        raise ModelNotFound(
            f"a file of the model is missing: {shown(str(path), 300)}: file {number + 1} of {split.count}",
            hint="Put all files of the model in the same folder.",
        ) from missing


def no_other(name: str) -> Source:
    """Raise ModelNotFound. Models that consist of one file use this function as their OpenShard."""
    raise ModelNotFound(f"no such model file: {shown(name, 300)}: only the first file was given")


class GGUFFile(Metadata):
    """An open model, stored in one file or in several shards. Arrays read from the model stay valid after `close`.

    The class is a context manager and inherits typed getters, as in `file.integer("llama.block_count", minimum=1)`.

    path        the path of the file or the first shard
    version     2 or 3
    alignment   each tensor is padded to a multiple of this many bytes
    file_bytes  the total size of all files of the model
    metadata    key -> bool, int, float, str, NumPy array (a read-only view of the header) or StringArray
    types       key -> its type in the file: "u32", "str", "arr[f32]", ...
    tensors     name -> TensorInfo, in file order
    read_s      how long `open_gguf` took, in seconds

    The metadata, version and alignment come from the first shard.
    """

    def __init__(self, path: Path, source: Source, header: Header, tensors: dict[str, TensorInfo]) -> None:
        super().__init__(path, header.metadata, header.types)
        self.version = header.version
        self.alignment = header.alignment
        self.file_bytes = source.size
        self.tensors = tensors
        self.read_s = 0.0
        self._source = source

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and release the header's arrays. Idempotent."""
        self._source.close()
        kept = {key: value for key, value in self.metadata.items() if isinstance(value, bool | int | float | str)}
        self.metadata = kept

    def read(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """Read a tensor into a new array, uint8[tensor.nbytes].

        Raises ModelFileError if the file has changed or cannot be read.
        """
        data = np.empty(tensor.nbytes, np.uint8)
        self.read_into(tensor, 0, data)
        return data

    def read_into(self, tensor: TensorInfo, start: int, into: NDArray[np.uint8]) -> None:
        """Fill the contiguous array `into`, uint8[n], with a tensor's bytes starting at byte `start`. Thread-safe.

        Raises the same errors as `read`, and ValueError if the range is outside the tensor or the file is closed.
        """
        if start < 0 or start + len(into) > tensor.nbytes:
            raise ValueError(f"bytes {start} to {start + len(into)} of a tensor of {tensor.nbytes}")
        self._source.read(tensor.offset + start, into.data)

    def with_placeholder_weights(self) -> GGUFFile:
        """Return the same model with placeholder weights, which are all 1.0.

        Sizes and plans can then be computed without reading tensors.
        """
        header = Header(self.version, self.alignment, len(self.tensors), dict(self.metadata), dict(self.types))
        return GGUFFile(self.path, RangeSource(_ones, self.file_bytes, self.path), header, self.tensors)

    def check_unchanged(self) -> None:
        """Raise ModelFileError if any of the files was modified after it was opened.

        Call this method after the last read, because a mixture of two versions of a file would produce nonsense.
        """
        self._source.check_unchanged()

    def check_in_place(self) -> None:
        """Raise ModelFileError if any of the files was replaced or modified after it was opened.

        Call this method after another library has opened the same path, to make sure that both opened the same file.
        """
        self._source.check_in_place()


def _ones(start: int, end: int) -> bytes:
    """Return the bytes from `start` to `end` of 32-bit floats with the value 1.0."""
    return np.ones(-(-(end - start) // 4), "<f4").tobytes()[: end - start]


_SAMPLE = 4096  # bytes per sample


def sampled_digest(file: GGUFFile) -> str:
    """Return a sha256, in hexadecimal, of a model's header and of samples of all its tensors.

    Hashing all bytes of a large file would take longer than opening it. Two models with the same header, such as two
    fine-tuned versions of one model, have different samples. Raises ModelFileError.
    """
    hashed = hashlib.sha256()
    hashed.update(str(file.file_bytes).encode())
    header_bytes = min((tensor.offset for tensor in file.tensors.values()), default=file.file_bytes)
    with file.path.open("rb") as stream:
        hashed.update(stream.read(header_bytes))
    for name, tensor in file.tensors.items():
        hashed.update(f"{name} {tensor.nbytes}".encode())
        sample = np.empty(min(_SAMPLE, tensor.nbytes), np.uint8)
        for start in (0, (tensor.nbytes - len(sample)) // 2):
            file.read_into(tensor, start, sample)
            hashed.update(sample.tobytes())
    return hashed.hexdigest()
