"""Which models are open now: whoever opens one says so, and whoever removes one asks.

A lock on the open file itself says it (flock): it ends with the process, however that ends, and it needs no file of its
own. Windows needs none of this: an open file cannot be removed there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from llmrun.hub.local.scandir import model_files


@contextmanager
def in_use(model: Path) -> Iterator[None]:
    """Keep `llmrun rm` and `llmrun prune` off a model, all of its shards, while the block runs."""
    with ExitStack() as held:
        for path in model_files(model):
            _lock(held, path, shared=True)
        yield


@contextmanager
def alone_with(paths: Iterable[Path]) -> Iterator[Path | None]:
    """Gives the first of these files that somebody has open, or None: then nobody opens them while the block runs."""
    with ExitStack() as held:
        yield next((path for path in paths if not _lock(held, path, shared=False)), None)


def _lock(held: ExitStack, path: Path, *, shared: bool) -> bool:
    """Whether nobody is in the way. A file that cannot be locked, on a file system that knows no locks, is free."""
    if os.name != "posix":
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
