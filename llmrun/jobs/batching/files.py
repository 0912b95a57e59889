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

from llmrun.base.errors import DoesNotFit, LlmrunError, UsageError
from llmrun.base.machine import shell
from llmrun.hub.local.open_models import alone_with, in_use
from llmrun.hub.local.safe_writes import require_space, sync_folder

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNRESOLVABLE: Final = 1921  # Windows: ERROR_CANT_RESOLVE_FILENAME
_CONTINUE: Final = "free up space, then run the same command again to continue"
MORE_ROOM: Final = "free up space, or write to a folder on a larger disk"

Stamp = list[int]


def stamp_of(path: Path) -> Stamp | None:
    """Return the size and the time of a file, which change when it is written again, or None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def resolved(path: Path) -> Path:
    """Return the file that a path names, after following links, so that the file is replaced and not a link.

    Raises UsageError for links that lead in a circle.
    """
    try:
        path.stat()  # since Python 3.13, Path.resolve accepts loops
    except OSError as error:
        if error.errno == errno.ELOOP or getattr(error, "winerror", 0) == _UNRESOLVABLE:
            raise UsageError(f"{path}: the symbolic links form a loop") from None
    return path.resolve() if path.is_symlink() else path


@contextmanager
def new_file(path: Path, check: Callable[[], None] = lambda: None, *, hint: str = _CONTINUE) -> Iterator[FileIO]:
    """Yield a file that replaces `path` when the block has ended without an exception. Its `name` is its current path.

    check  called directly before; may raise an exception
    hint   what to do if the disk is full
    Raises DoesNotFit if the disk is full, and LlmrunError.
    """
    temporary = path.with_name(f".{path.name}.llmrun-{secrets.token_hex(8)}")
    with writing(path, hint):
        file = FileIO(temporary, "x+")
    try:
        with writing(path, hint), file, in_use(temporary):
            yield file
            os.fsync(file.fileno())
        check()
        with writing(path, hint):
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_absent(path: Path) -> None:
    """Raise UsageError if the file already exists, or its folder does not exist."""
    if os.path.lexists(path):
        raise UsageError(f"{path}: already exists", hint="choose another name, or remove it first")
    if not path.parent.is_dir():
        create = shell.words(["mkdir", "-p", str(path.parent)])
        raise UsageError(f"{path}: there is no folder {path.parent}", hint=f"create it: {create}")


@contextmanager
def absent_file(path: Path, n_bytes: int = 0) -> Iterator[FileIO]:
    """Yield a file as `new_file` does, but never replace another one. Remove what killed processes have left behind.

    n_bytes  the size that the file will have, if it is known

    Raises UsageError if the file exists or its folder does not, DoesNotFit if the disk is too small, and LlmrunError.
    """
    check_absent(path)
    remove_leftovers(path)
    require_space(path.parent, n_bytes, path.name, hint=MORE_ROOM)
    with new_file(path, lambda: check_absent(path), hint=MORE_ROOM) as file:
        yield file


def remove_leftovers(*paths: Path) -> None:
    """Remove temporary files of `new_file` that killed processes have left behind."""
    for path in paths:
        name = re.compile(rf"\.{re.escape(path.name)}(\.partial)?\.llmrun-[0-9a-f]{{16}}")
        with suppress(OSError):  # a folder that cannot be listed has no leftovers that matter
            for found in path.parent.iterdir():
                if name.fullmatch(found.name) and stat.S_ISREG(found.lstat().st_mode):
                    with alone_with([found]) as busy:
                        if busy is None:
                            found.unlink()


@contextmanager
def writing(path: Path, hint: str = _CONTINUE) -> Iterator[None]:
    """Convert an OSError from writing to `path` to an LlmrunError. `hint` says what to do if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DoesNotFit(f"disk: {path.parent}: full, {_free_text(path.parent)}", hint=hint) from error
        raise LlmrunError(f"{path}: cannot be written: {error.strerror or error}") from error


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes free"
    except OSError as error:
        return f"free space unknown ({error.strerror})"
