"""One process at a time: the others wait, and say so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from llmrun.hub.local.safe_writes import make_folder, writing


@contextlib.contextmanager
def held(lock: Path, root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock at this path, below the folder `root`; `waiting` is called if another process has it.

    The system frees it when its holder dies. Raises LlmrunError for a folder that cannot be written.
    """
    import filelock

    make_folder(lock.parent, root)
    with writing(lock):
        # Others of the user's group may share the cache: huggingface_hub makes its locks with this mode too.
        taken: filelock.BaseFileLock = filelock.FileLock(lock, mode=0o664)
        try:
            taken.acquire(timeout=0)
        except filelock.Timeout:
            waiting()
            taken.acquire()
        except NotImplementedError:  # a network folder without locks: huggingface_hub falls back to the same kind
            taken = filelock.SoftFileLock(lock)
            taken.acquire()
    try:
        yield
    finally:
        taken.release()
