"""An inter-process lock that calls a callback before it blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from llmrun.hub.local.safe_writes import make_folder, writing


@contextlib.contextmanager
def held(lock: Path, root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `lock`, which is inside the folder `root`, while the block runs.

    If another process holds the lock, calls `waiting` and then waits. The system releases the lock when the process
    that holds it dies. Raises LlmrunError if the folder is not writable.
    """
    import filelock

    make_folder(lock.parent, root)
    with writing(lock):
        # The user's group may share the cache, so the mode is the same as for huggingface_hub's locks.
        taken: filelock.BaseFileLock = filelock.FileLock(lock, mode=0o664)
        try:
            taken.acquire(timeout=0)
        except filelock.Timeout:
            waiting()
            taken.acquire()
        except NotImplementedError:  # network folders may not support locks; huggingface_hub uses the same fallback
            taken = filelock.SoftFileLock(lock)
            taken.acquire()
    try:
        yield
    finally:
        taken.release()
