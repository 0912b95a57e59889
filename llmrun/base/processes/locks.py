"""File locks that the system releases when their holder ends, even if it is killed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from llmrun.base.errors import LlmrunError

_WAIT_S: Final = 10.0


class LockHeld(LlmrunError):
    """Raised if another process still holds a lock when the caller's waiting time is over."""


@contextmanager
def locked(path: Path, seconds: float = _WAIT_S) -> Iterator[None]:
    """Hold the lock of a file, which is created if necessary, in the `with` block. Raises LockHeld and OSError."""
    import filelock

    try:
        lock = filelock.FileLock(path, timeout=seconds, mode=0o600, thread_local=False)
        lock.acquire()
    except filelock.Timeout:
        raise LockHeld(f"another llmrun command still uses {path.parent}", hint=f"its lock is {path}") from None
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path, seconds: float = 0.0) -> bool:
    """Return whether a process still holds the lock of a file after `seconds`. Raises OSError.

    Another process that calls this function holds the lock for a moment, so the result may be wrong with 0 seconds.
    """
    if not path.exists():
        return False
    try:
        with locked(path, seconds):
            return False
    except LockHeld:
        return True


@contextmanager
def claim(folder: Path) -> Iterator[Path]:
    """Create a file in a folder, hold its lock in the `with` block, and remove it. Yields its path. Raises OSError."""
    with ExitStack() as held:
        while True:
            path = folder / f"{secrets.token_hex(4)}.lock"
            lock = held.enter_context(ExitStack())
            lock.enter_context(locked(path))
            if path.exists():  # `claimed` may have removed the file before it was locked
                break
            lock.close()
        try:
            yield path
        finally:
            with suppress(OSError):  # Windows does not remove open files
                path.unlink()
    path.unlink(missing_ok=True)


def claimed(folder: Path, forget: Callable[[Path], None] = lambda path: None) -> bool:
    """Return whether anybody holds a claim in a folder, and remove the claims of killed processes.

    forget  called with the file of each claim that is removed, before the removal
    """
    found = False
    for path in folder.glob("*.lock"):
        try:
            with locked(path, 0):
                forget(path)
                with suppress(OSError):  # Windows does not remove open files
                    path.unlink()
        except LockHeld:
            found = True
    return found
