"""The beginning of files with saved states, and how to open such a file. Importing this is fast."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Final

from llmrun.base.open_flags import O_BINARY, O_NONBLOCK

_NAME: Final = b"llmrun state "
MAGIC: Final = _NAME + b"2\n\0"  # with the version of the format


def may_overwrite(path: Path) -> bool:
    """Return whether a file is a saved state, of any version of the format, empty or missing. Raises OSError."""
    try:
        with open_regular(path) as file:
            return file.read(len(_NAME)) in (_NAME, b"")
    except FileNotFoundError:
        return True


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError, also for anything but a regular file."""
    descriptor = os.open(path, os.O_RDONLY | O_BINARY | O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")  # noqa: PTH123  pathlib cannot open a descriptor
