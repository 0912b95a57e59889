"""Locks that keep `llmrun rm` and `llmrun prune` from removing open models.

The locks are flocks on the model files themselves. They require no lock files, and the system releases them when the
process ends, even if it crashes. Windows needs no locks because open files cannot be removed there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from llmrun.hub.local.scandir import model_files


@contextmanager
def in_use(model: Path) -> Iterator[None]:
    """Protect a model and all its shards from `llmrun rm` and `llmrun prune` while the block runs."""
    with ExitStack() as held:
        for path in model_files(model):
            _lock(held, path, shared=True)
        yield


@contextmanager
def alone_with(paths: Iterable[Path]) -> Iterator[Path | None]:
    """Lock these files exclusively while the block runs. Yields None on success.

    If another process has one of the files open, yields that file instead.
    """
    with ExitStack() as held:
        yield next((path for path in paths if not _lock(held, path, shared=False)), None)


def _lock(held: ExitStack, path: Path, *, shared: bool) -> bool:
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
