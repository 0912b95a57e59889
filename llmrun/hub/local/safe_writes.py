"""Writing safely: room before the first byte, the system's refusals in a sentence, names that appear in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import DoesNotFit, LlmrunError

if TYPE_CHECKING:
    from llmrun.hub.progress_reporter import Reporter

CHUNK = 1 << 20  # bytes read and hashed at a time
SPARE = 64 << 20  # bytes that stay free: a disk filled to the last byte hurts every other program
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ANOTHER_FOLDER = "set LLMRUN_DATA_DIR or HF_HOME to a folder you may write to"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write below `path` into one sentence with the numbers."""
    try:
        yield
    except BrokenPipeError:
        raise  # from a reporter whose reader has gone: not about this file
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DoesNotFit(
                f"disk: {path}: larger than this file system takes", hint="set HF_HOME to a folder on another disk"
            ) from error
        if error.errno in _FULL:
            raise DoesNotFit(
                f"disk: {path.parent}: full, {_free_text(path.parent)}",
                hint="make room: the download goes on from where it is, or set HF_HOME to a larger disk",
            ) from error
        raise LlmrunError(
            f"disk: {error.filename or path}: cannot be written: {error.strerror or error}", hint=_ANOTHER_FOLDER
        ) from error


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise DoesNotFit unless `needed` bytes, and SPARE more, are free where `folder` is, or will be."""
    if needed <= 0:
        return
    with writing(folder / "x"):
        free = shutil.disk_usage(_existing(folder)).free
    if free < needed + SPARE:
        raise DoesNotFit(
            f"disk: {folder}: {what} needs {needed:,} bytes and {SPARE:,} to spare, {free:,} are free",
            hint="make room, or set LLMRUN_DATA_DIR and HF_HOME to folders on a larger disk",
        )


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(_existing(folder)).free:,} bytes are free"
    except OSError as error:
        return f"free bytes unknown ({error.strerror})"


def make_folder(folder: Path, root: Path) -> None:
    """`folder`, below `root`, and all above it. Raises LlmrunError for one that is a link out of `root`.

    `root` itself may be a link: people keep their caches on other disks. Below it nothing leads outside, so that a
    link which somebody put there cannot have us write elsewhere.
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
                    f"disk: {current}: a link that leads out of {root}: not written through",
                    hint="move the whole folder with HF_HOME or LLMRUN_DATA_DIR, or remove the link",
                )
            if not current.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(current))


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut. Windows does not let a folder be opened, and needs none."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, final: Path) -> None:
    """Give a whole file its name, in one step that survives a power cut; a link of that name is replaced."""
    with writing(final):
        partial.replace(final)
        sync_folder(final.parent)


def digest(path: Path, reporter: Reporter, label: str) -> str:
    """The sha256 of a file, in hexadecimal. Raises OSError."""
    import hashlib

    state, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            done += len(chunk)
            reporter.progress(label, done, max(done, total))
    return state.hexdigest()
