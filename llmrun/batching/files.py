"""Writes files beside the user's own without ever touching those."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final

from llmrun.errors import DoesNotFit, LlmrunError
from llmrun.hub.local.safe_writes import sync_folder

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Stamp = list[int]


def stamp_of(path: Path) -> Stamp | None:
    """Return the size and the time of a file, which change when it is written again, or None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


@contextmanager
def new_file(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[FileIO]:
    """Yield a file that replaces `path` when the block has ended without an exception.

    check  called directly before; may raise an exception
    Raises DoesNotFit if the disk is full, and LlmrunError.
    """
    temporary = path.with_name(f".{path.name}.llmrun-{secrets.token_hex(8)}")
    with writing(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file = FileIO(os.open(temporary, flags, 0o666), "r+b")
    try:
        with writing(path), file:
            yield file
            os.fsync(file.fileno())
        check()
        with writing(path):
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(*paths: Path) -> None:
    """Remove temporary files of `new_file` that killed processes have left behind."""
    for path in paths:
        name = re.compile(rf"\.{re.escape(path.name)}(\.partial)?\.llmrun-[0-9a-f]{{16}}")
        with suppress(OSError):  # a folder that cannot be listed has no leftovers that matter
            for found in path.parent.iterdir():
                if name.fullmatch(found.name) and stat.S_ISREG(found.lstat().st_mode):
                    found.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError from writing to `path` to an LlmrunError with a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DoesNotFit(
                f"disk: {path.parent}: full, {_free_text(path.parent)}",
                hint="free up space, then run the same command again to continue",
            ) from error
        raise LlmrunError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes free"
    except OSError as error:
        return f"free space unknown ({error.strerror})"
