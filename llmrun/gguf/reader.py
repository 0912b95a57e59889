"""Opening a GGUF file: checked from end to end of its header, and read, not mapped.

Everything a backend later relies on is checked here or in the architecture's own file: a file that opens does not
crash what reads it. llama.cpp accepts more, and aborts the process on some of that.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llmrun.errors import BadGGUF
from llmrun.gguf.cursor import Cursor
from llmrun.gguf.header import Header, read_header
from llmrun.gguf.hyperparameters import check_hyperparameters
from llmrun.gguf.metadata import Metadata
from llmrun.gguf.source import FileSource, MemorySource, OnesSource, Source
from llmrun.gguf.tensors import TensorInfo, read_tensors
from llmrun.gguf.vocabulary import check_vocabulary


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a file, read its header into memory and check it. Tensors are read when they are asked for.

    Raises ModelNotFound (there is no such file), BadGGUF (a rule of the format is broken), UnsupportedModel (one
    part of a split model) and ModelFileError (it cannot be read, or is being written to).
    """
    path = Path(path)
    source = FileSource(path)
    with ExitStack() as on_failure:
        on_failure.callback(source.close)
        try:
            file = _read(source, path)
        except BadGGUF:
            source.check_unchanged()  # or a copy that is still under way would be called a broken file
            raise
        on_failure.pop_all()
        return file


def read_gguf(data: bytes, path: Path) -> GGUFFile:
    """Check a file that is already in memory; `path` is for messages. Raises as `open_gguf` does."""
    return _read(MemorySource(data), path)


def _read(source: Source, path: Path) -> GGUFFile:
    return read_whole_header(Cursor(source, path), source)


def read_whole_header(cursor: Cursor, source: Source) -> GGUFFile:
    """Read and check everything before the tensors. Raises BadGGUF and UnsupportedModel."""
    header = read_header(cursor)
    file = GGUFFile(cursor.path, source, header, read_tensors(cursor, header))
    check_hyperparameters(file)
    if file.has("tokenizer.ggml.tokens"):
        check_vocabulary(file)
    return file


class GGUFFile(Metadata):
    """An open file. A context manager; arrays taken from it stay valid after `close`.

    The typed getters of `Metadata` are its own: `file.integer("llama.block_count", minimum=1)`.

    path        where it was opened
    version     2 or 3
    alignment   bytes each tensor is padded to
    file_bytes  its size
    metadata    key -> bool, int, float, str, NumPy array (a read-only view of the header) or StringArray
    types       key -> the type it was written with: "u32", "str", "arr[f32]", ...
    tensors     name -> TensorInfo, in file order
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
        """Close the file, and let go of the header's arrays. Idempotent."""
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
        self._source.read(tensor.offset + start, into)

    def with_made_up_weights(self) -> GGUFFile:
        """The same file, of which no tensor is read: all are 1.0 where they are floats. For arithmetic about it."""
        header = Header(self.version, self.alignment, len(self.tensors), dict(self.metadata), dict(self.types))
        return GGUFFile(self.path, OnesSource(self.file_bytes), header, self.tensors)

    def check_unchanged(self) -> None:
        """Raises ModelFileError when the file was written to since it was opened. To be asked after the last read:
        a model put together from two versions of a file would answer nonsense."""
        self._source.check_unchanged()

    def check_in_place(self) -> None:
        """Raises ModelFileError when the path is not this file's any more, or the file was written to. To be asked
        after another has opened the path: what he found there is this file, which was checked."""
        self._source.check_in_place()
