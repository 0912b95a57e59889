"""Bytes from a source to a file whose name can be trusted: measured, hashed, synced, and only then given its name."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmrun.errors import DoesNotFit, IntegrityError, LlmrunError, NetworkError
from llmrun.hub.catalog import CatalogEntry
from llmrun.hub.reporter import Reporter


def save_verified(
    chunks: Iterable[bytes], entry: CatalogEntry, partial: Path, final: Path, reporter: Reporter, label: str
) -> None:
    """Write `chunks` to `partial` and rename it to `final` when they are the entry's bytes, all of them and no more.

    Raises IntegrityError for wrong bytes, NetworkError for too few, DoesNotFit for a full disk and LlmrunError for a
    folder that cannot be written. Whatever goes wrong, Ctrl-C included, `partial` is removed and `final` untouched.
    """
    import hashlib

    state, done = hashlib.sha256(), 0
    try:
        with writing(partial), partial.open("wb") as file:
            for chunk in chunks:
                done += len(chunk)
                if done > entry.size:
                    raise IntegrityError(f"{done:,} bytes and more seen, {entry.size:,} expected")
                file.write(chunk)
                state.update(chunk)
                reporter.progress(label, done, entry.size)
            if done < entry.size:
                raise NetworkError(f"ended after {done:,} of {entry.size:,} bytes")
            if state.hexdigest() != entry.sha256:
                raise IntegrityError(
                    f"sha256 {state.hexdigest()} seen, {entry.sha256} expected; nothing was kept",
                    hint="try again, or from another network",
                )
            file.flush()
            os.fsync(file.fileno())
        with writing(final):
            partial.replace(final)
            sync_folder(final.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that brought us here says more
            partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write below `path` into one sentence with the numbers."""
    try:
        yield
    except BrokenPipeError:
        raise  # from a reporter whose reader has gone: not about this file
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(f"disk: {path.parent}: full") from error
        raise LlmrunError(
            f"disk: {error.filename or path}: cannot be written: {error.strerror or error}",
            hint="set LLMRUN_DATA_DIR or HF_HOME to a folder you may write to",
        ) from error


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise DoesNotFit unless `needed` bytes are free where `folder` is, or will be."""
    existing = folder
    with writing(folder):
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free
    if free < needed:
        raise DoesNotFit(
            f"disk: {folder}: {what} needs {needed:,} bytes, {free:,} are free",
            hint="make room, or set LLMRUN_DATA_DIR and HF_HOME to folders on a larger disk",
        )


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut. Windows does not let a folder be opened, and needs none."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
