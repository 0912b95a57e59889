"""Helpers for writing model files safely, and locks that keep open models from being removed.

The helpers check free space and links, rename files atomically, and raise readable errors.

The locks against `llmrun rm` and `llmrun prune` are flocks on the model files themselves. These locks require no lock
files, and the system releases them when the process ends, even if it crashes. Windows needs no locks because open files
cannot be removed there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import DoesNotFit, LlmrunError
from llmrun.hub.local.paths import model_files

if TYPE_CHECKING:
    from llmrun.hub.progress_reporter import Reporter

CHUNK = 1 << 20  # bytes to read and hash at a time
SPARE = 64 << 20  # bytes to leave free, because a full disk disrupts all other programs
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ANOTHER_DISK = "free up space, or set LLMRUN_DATA_DIR and HF_HOME to folders on a larger disk"
_ANOTHER_FOLDER = "set LLMRUN_DATA_DIR or HF_HOME to a folder that you can write to"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError raised while writing to `path` into an LlmrunError with a hint."""
    try:
        yield
    except BrokenPipeError:
        raise  # the file is not the cause; the program that reads our progress output has exited
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DoesNotFit(
                f"disk: {path}: too large for this file system", hint="set HF_HOME to a folder on another disk"
            ) from error
        if error.errno in _FULL:
            raise DoesNotFit(
                f"disk: {path.parent}: full, {_free_text(path.parent)}",
                hint="free up space and retry to resume the download, or set HF_HOME to a folder on a larger disk",
            ) from error
        raise LlmrunError(
            f"disk: {error.filename or path}: cannot be written: {error.strerror or error}", hint=_ANOTHER_FOLDER
        ) from error


def require_space(folder: Path, needed: int, what: str, *, hint: str = _ANOTHER_DISK) -> None:
    """Raise DoesNotFit unless `folder`'s disk has `needed` + SPARE bytes free. The folder need not exist."""
    if needed <= 0:
        return
    with writing(folder / "x"):
        free = shutil.disk_usage(existing_folder(folder)).free
    if free < needed + SPARE:
        raise DoesNotFit(
            f"disk: {folder}: {what} needs {needed:,} bytes plus {SPARE:,} in reserve, but {free:,} are free",
            hint=hint,
        )


def existing_folder(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(existing_folder(folder)).free:,} bytes free"
    except OSError as error:
        return f"free space unknown ({error.strerror})"


def make_folder(folder: Path, root: Path) -> None:
    """Create `folder` and its parents below `root`. Raises LlmrunError if a link below `root` leads outside it.

    `root` itself may be a link because people keep their caches on other disks. Links below `root` that lead outside
    are refused because an attacker could have placed them to redirect our writes.
    """
    with writing(folder):
        root.mkdir(parents=True, exist_ok=True)
        inside = Path(os.path.realpath(root))
        current = root
        for part in folder.relative_to(root).parts:
            current = current / part
            with contextlib.suppress(FileExistsError):
                current.mkdir()
            if not Path(os.path.realpath(current)).is_relative_to(inside):
                raise LlmrunError(
                    f"disk: {current}: this link leads out of {root}, so nothing is written to it",
                    hint="move the whole folder with HF_HOME or LLMRUN_DATA_DIR, or remove the link",
                )
            if not current.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(current))


def sync_folder(folder: Path) -> None:
    """Make renames in this folder survive a power failure. Does nothing on Windows, where folders cannot be opened."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically, after the new text has reached the disk. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)  # opening an existing link would follow it
    try:
        with new.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a complete file to its final name atomically and durably. An existing link is replaced, not followed."""
    with writing(final):
        partial.replace(final)
        sync_folder(final.parent)


def digest(path: Path, reporter: Reporter, label: str) -> str:
    """Return the sha256 of a file in hexadecimal. Raises OSError."""
    import hashlib

    state, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            done += len(chunk)
            reporter.progress(label, done, max(done, total))
    return state.hexdigest()


@contextmanager
def in_use(model: Path) -> Iterator[None]:
    """Protect a model and all its shards from `llmrun rm` and `llmrun prune` while the block runs."""
    with ExitStack() as held:
        for path in model_files(model):
            try_lock(held, path, shared=True)
        yield


@contextmanager
def alone_with(paths: Iterable[Path]) -> Iterator[Path | None]:
    """Lock these files exclusively while the block runs. Yields None on success.

    If another process has one of the files open, yields that file instead.
    """
    with ExitStack() as held:
        yield next((path for path in paths if not try_lock(held, path, shared=False)), None)


def try_lock(held: ExitStack, path: Path, *, shared: bool) -> bool:
    """Try to lock a file. Returns False if another process holds a conflicting lock.

    If the file system does not support locks, the result is True.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return True
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
