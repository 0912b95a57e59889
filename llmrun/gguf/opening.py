"""Opens model files and turns operating system errors into llmrun's own. Does not import NumPy."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from llmrun.errors import ModelFileError, ModelNotFound
from llmrun.gguf.problems import shown

# What a mistyped path can end in.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Turn an OSError about this file into ModelNotFound or ModelFileError."""
    try:
        yield
    except OSError as error:
        message = f"{shown(str(path), 300)}: {error.strerror or error}"
        if error.errno in _NO_SUCH_FILE:
            raise ModelNotFound(f"no such model file: {message}", hint="Check the path.") from None
        raise ModelFileError(f"the model file cannot be read: {message}", hint="Check its permissions.") from error


def opened(path: Path) -> FileIO:
    try:
        status = path.stat()
    except ValueError:
        raise ModelNotFound(f"no such model file: {shown(str(path), 300)}: a NUL byte in the name") from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelNotFound(f"not a model file: {shown(str(path), 300)}: a folder", hint="Name the .gguf file in it.")
    if not stat.S_ISREG(status.st_mode):
        # Opening a named pipe would wait for a writer for ever.
        raise ModelFileError(f"not a model file: {shown(str(path), 300)}: a device or a pipe")
    return path.open("rb", buffering=0)
