"""Opening a GGUF file: checked from end to end of its header, and read, not mapped.

Everything a backend later relies on is checked here or in the architecture's own file: a file that opens does not
crash what reads it. llama.cpp accepts more, and aborts the process on some of that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llmrun.errors import BadGGUF, ModelNotFound
from llmrun.gguf.cursor import Cursor
from llmrun.gguf.header import Header, read_header
from llmrun.gguf.hyperparameters import check_hyperparameters
from llmrun.gguf.metadata import Metadata
from llmrun.gguf.problems import shown
from llmrun.gguf.shards import TENSORS, Split, check_shard, read_split
from llmrun.gguf.source import FileSource, JoinedSource, MemorySource, OnesSource, Source
from llmrun.gguf.tensors import TensorInfo, read_tensors
from llmrun.gguf.vocabulary import check_vocabulary

OpenShard = Callable[[str], Source]  # by the name of a file beside the first; raises ModelNotFound


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a model by its file, or by the first of its files (shards.py), read the headers into memory and check them.
    Tensors are read when they are asked for.

    Raises ModelNotFound (there is no such file, or one of several is missing), BadGGUF (a rule of the format is broken)
    and ModelFileError (it cannot be read, is being written to, or is not the first of several).
    """
    path = Path(path)
    return read_source(FileSource(path), path, lambda name: FileSource(path.with_name(name)))


def read_gguf(data: bytes, path: Path) -> GGUFFile:
    """Check a file that is already in memory and alone; `path` is for messages. Raises as `open_gguf` does."""
    return read_source(MemorySource(data), path, no_other)


def read_source(source: Source, path: Path, open_shard: OpenShard) -> GGUFFile:
    """Check a model wherever its bytes come from. Raises as `open_gguf` does.

    source      its first file; closed with the GGUFFile, or on failure
    path        its name, by which the others are named too; and for messages
    open_shard  opens another of its files
    """
    with ExitStack() as on_failure:
        on_failure.callback(source.close)
        try:
            first = read_whole_header(Cursor(source, path), source)
        except BadGGUF:
            source.check_unchanged()  # or a copy that is still under way would be called a broken file
            raise
        file = with_shards(first, open_shard)
        on_failure.pop_all()
        return file


def read_whole_header(cursor: Cursor, source: Source) -> GGUFFile:
    """Read and check everything before the tensors of one file. Raises BadGGUF."""
    header = read_header(cursor)
    file = GGUFFile(cursor.path, source, header, read_tensors(cursor, header))
    check_hyperparameters(file)
    if file.has("tokenizer.ggml.tokens"):
        check_vocabulary(file)
    return file


def with_shards(first: GGUFFile, open_shard: OpenShard) -> GGUFFile:
    """The model of which `first` is the first file, in whatever way its header was read: with the tensors of all its
    files, and closed with them; `first` itself where that is all. Raises as `open_gguf` does, and has closed them."""
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
                seen = f"{split.tensors} seen, must be {len(tensors)}: so many are in {split.count} files"
                raise first.bad(TENSORS, seen)
        except BadGGUF:
            joined.check_unchanged()
            raise
        on_failure.pop_all()
    header = Header(first.version, first.alignment, len(tensors), dict(first.metadata), dict(first.types))
    return GGUFFile(first.path, joined, header, tensors)


def _behind(shard: GGUFFile, begin: int, before: Container[str]) -> dict[str, TensorInfo]:
    """Its tensors, where they lie when its bytes begin at `begin` of all."""
    for name in shard.tensors:
        if name in before:
            raise shard.bad(name, "the tensor is there twice, the first time in an earlier file of the model")
    return {name: replace(tensor, offset=begin + tensor.offset) for name, tensor in shard.tensors.items()}


def _open(open_shard: OpenShard, path: Path, number: int, split: Split) -> Source:
    try:
        return open_shard(path.name)
    except ModelNotFound as missing:
        raise ModelNotFound(
            f"a file of the model is missing: {shown(str(path), 300)}: file {number + 1} of {split.count}",
            hint="All files of a model must lie beside the first one.",
        ) from missing


def no_other(name: str) -> Source:
    """An OpenShard for a file that is alone."""
    raise ModelNotFound(f"no such model file: {shown(name, 300)}: a file in memory is alone")


class GGUFFile(Metadata):
    """An open model, in one file or several. A context manager; arrays taken from it stay valid after `close`.

    The typed getters of `Metadata` are its own: `file.integer("llama.block_count", minimum=1)`.

    path        where it was opened: its file, or the first of several
    version     2 or 3
    alignment   bytes each tensor is padded to
    file_bytes  its size, of all its files together
    metadata    key -> bool, int, float, str, NumPy array (a read-only view of the header) or StringArray
    types       key -> the type it was written with: "u32", "str", "arr[f32]", ...
    tensors     name -> TensorInfo, in file order

    The metadata, version and alignment are those of the first file.
    """

    def __init__(self, path: Path, source: Source, header: Header, tensors: dict[str, TensorInfo]) -> None:
        super().__init__(path, header.metadata, header.types)
        self.version = header.version
        self.alignment = header.alignment
        self.file_bytes = source.size
        self.tensors = tensors
        self._source = source

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its files, and let go of the header's arrays. Idempotent."""
        self._source.close()
        kept = {key: value for key, value in self.metadata.items() if isinstance(value, bool | int | float | str)}
        self.metadata = kept

    def read(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """uint8[tensor.nbytes], the caller's own. Raises ModelFileError (the file has changed, or cannot be read)."""
        data = np.empty(tensor.nbytes, np.uint8)
        self.read_into(tensor, 0, data)
        return data

    def read_into(self, tensor: TensorInfo, start: int, into: NDArray[np.uint8]) -> None:
        """Fill `into`, uint8[n], contiguous, with a tensor's bytes from byte `start` of it on. From any thread.

        Raises ModelFileError as `read` does, and ValueError for bytes outside the tensor or a closed file.
        """
        if start < 0 or start + len(into) > tensor.nbytes:
            raise ValueError(f"bytes {start} to {start + len(into)} of a tensor of {tensor.nbytes}")
        self._source.read(tensor.offset + start, into.data)

    def with_made_up_weights(self) -> GGUFFile:
        """The same file, of which no tensor is read: all are 1.0 where they are floats. For arithmetic about it."""
        header = Header(self.version, self.alignment, len(self.tensors), dict(self.metadata), dict(self.types))
        return GGUFFile(self.path, OnesSource(self.file_bytes), header, self.tensors)

    def check_unchanged(self) -> None:
        """Raises ModelFileError when a file was written to since it was opened. To be asked after the last read:
        a model put together from two versions of a file would answer nonsense."""
        self._source.check_unchanged()

    def check_in_place(self) -> None:
        """Raises ModelFileError when a path is not its file's any more, or a file was written to. To be asked
        after another has opened the path: what he found there is this model, which was checked."""
        self._source.check_in_place()
