"""Opens model files and converts operating system errors to llmrun's own. Does not import NumPy."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from llmrun.base.errors import ModelFileError, ModelNotFound
from llmrun.formats.gguf.problems import shown

FOLDER = "a folder"
NAME_A_FILE = "name a .gguf file"
_KINDS = (
    (stat.S_ISDIR, FOLDER),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)

# Mistyped paths cause these errors.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)  # open files


@contextmanager
def opening(path: Path, kind: str = "model file") -> Iterator[None]:
    """Convert any OSError about this file to ModelNotFound or ModelFileError. `kind` names it in messages."""
    try:
        yield
    except OSError as error:
        message = f"{shown(str(path), 300)}: {error.strerror or error}"
        if error.errno in _NO_SUCH_FILE:
            raise ModelNotFound(f"no such {kind}: {message}", hint="Check the path.") from None
        hint = "Raise the limit, such as with ulimit -n 4096." if error.errno in _TOO_MANY else "Check its permissions."
        raise ModelFileError(f"the {kind} cannot be read: {message}", hint=hint) from error


def opened(path: Path) -> FileIO:
    """Open a regular file for reading. Raises ModelNotFound, ModelFileError and OSError."""
    try:
        kind = kind_of(path)
    except ValueError:
        raise ModelNotFound(f"no such model file: {shown(str(path), 300)}: a NUL byte in the name") from None
    if kind == FOLDER:
        raise ModelNotFound(f"not a model file: {shown(str(path), 300)} is a folder", hint="Name the .gguf file in it.")
    if kind:
        # Opening a named pipe would block until a writer opens it.
        raise ModelFileError(f"not a regular file: {shown(str(path), 300)}: {kind}", hint=NAME_A_FILE)
    return path.open("rb", buffering=0)


def kind_of(path: Path) -> str:
    """Describe the kind of file at a path, such as "a folder" or "a device". Returns "" for a regular file.

    Raises OSError if the path does not exist, and ValueError if it contains a NUL byte.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link that leads to itself", str(path)) from None
    if stat.S_ISREG(mode):
        return ""
    for is_kind, words in _KINDS:
        if is_kind(mode):
            return words
    return "of a kind that cannot be read"
