"""Opening a GGUF file: mapped, checked from end to end of its header, nothing copied.

Everything a backend later relies on is checked here or in the architecture's own file: a file that opens does not
crash what reads it. llama.cpp accepts more, and aborts the process on some of that.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llmrun.errors import ModelFileError, ModelNotFound
from llmrun.gguf.cursor import Buffer, Cursor
from llmrun.gguf.header import Header, read_header
from llmrun.gguf.metadata import Metadata
from llmrun.gguf.problems import shown
from llmrun.gguf.tensors import TensorInfo, read_tensors
from llmrun.gguf.vocabulary import check_vocabulary

# What a mistyped path can end in.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Map a file read-only and check it.

    Raises ModelNotFound (there is no such file), BadGGUF (a rule of the format is broken), UnsupportedModel (one
    part of a split model) and ModelFileError (it cannot be read). A file that is cut off while it is open kills the
    process (SIGBUS): no program can map a file and prevent that.
    """
    path = Path(path)
    try:
        data = _mapped(path)
    except OSError as error:
        message = f"{shown(str(path), 300)}: {error.strerror or error}"
        if error.errno in _NO_SUCH_FILE:
            raise ModelNotFound(f"no such model file: {message}", hint="Check the path.") from None
        raise ModelFileError(f"the model file cannot be read: {message}", hint="Check its permissions.") from error
    return read_gguf(data, path)


def read_gguf(data: Buffer, path: Path) -> GGUFFile:
    """Check a file that is already in memory; `path` is for messages. Raises as `open_gguf` does."""
    cursor = Cursor(data, path)
    header = read_header(cursor)
    file = GGUFFile(path, cursor.bytes, header, read_tensors(cursor, header))
    if file.has("tokenizer.ggml.tokens"):
        check_vocabulary(file)
    return file


def _mapped(path: Path) -> Buffer:
    try:
        status = path.stat()
    except ValueError:
        raise ModelNotFound(f"no such model file: {shown(str(path), 300)}: a NUL byte in the name") from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelNotFound(f"not a model file: {shown(str(path), 300)}: a folder", hint="Name the .gguf file in it.")
    if not stat.S_ISREG(status.st_mode):
        # Opening a named pipe would wait for a writer for ever.
        raise ModelFileError(f"not a model file: {shown(str(path), 300)}: a device or a pipe")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class GGUFFile(Metadata):
    """An open file. A context manager; arrays taken from it stay valid after `close`.

    The typed getters of `Metadata` are its own: `file.integer("llama.block_count", minimum=1)`.

    path        where it was opened
    version     2 or 3
    alignment   bytes each tensor is padded to
    file_bytes  its size
    metadata    key -> bool, int, float, str, NumPy array (a read-only view of the file) or StringArray
    types       key -> the type it was written with: "u32", "str", "arr[f32]", ...
    tensors     name -> TensorInfo, in file order
    """

    def __init__(self, path: Path, data: NDArray[np.uint8], header: Header, tensors: dict[str, TensorInfo]) -> None:
        super().__init__(path, header.metadata, header.types)
        self.version = header.version
        self.alignment = header.alignment
        self.file_bytes = len(data)
        self.tensors = tensors
        self._data: NDArray[np.uint8] | None = data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapping. It ends when the last array taken from it does, so none is left dangling."""
        self._data = None
        kept = {key: value for key, value in self.metadata.items() if isinstance(value, bool | int | float | str)}
        self.metadata = kept

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """uint8[tensor.nbytes], a read-only view of the file."""
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        return self._data[tensor.offset : tensor.offset + tensor.nbytes]
