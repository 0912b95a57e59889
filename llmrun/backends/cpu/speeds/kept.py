"""Files in the cache folder with the speeds measured on this machine, one file for each number of threads.

A file is used if it is well formed, less than a month old, and was written for the same processor, instruction-set
level, number of threads and llmrun version.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from llmrun import __version__
from llmrun.base import folders
from llmrun.base.compiled.levels import host_target

_MOST_SECONDS = 30 * 24 * 3600
_MOST_FILE_BYTES = 1 << 20

Known = dict[str, dict[str, Any]]  # the measured figures of each subject, such as "linear q8_0"


def kept_speeds(n_threads: int) -> Known:
    """Return the stored speeds, or {} if there are no usable ones."""
    path = _path(n_threads)
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            return {}
        body = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - body["measured"]
        if body["machine"] != _machine(n_threads) or not 0 <= age < _MOST_SECONDS:
            return {}
        return {name: dict(values) for name, values in body["speeds"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}  # the file is missing or damaged, so the speeds are measured again


def keep_speeds(n_threads: int, known: Known) -> None:
    """Store speeds for later processes. If that fails, they measure again."""
    path = _path(n_threads)
    body = {"measured": time.time(), "machine": _machine(n_threads), "speeds": known}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as part:
            json.dump(body, part)
        Path(part.name).replace(path)


def _machine(n_threads: int) -> list[Any]:
    target = host_target()
    return [target.cpu, target.level.name, n_threads, os.cpu_count(), __version__]


def _path(n_threads: int) -> Path:
    return folders.cache_folder() / "speeds" / f"{n_threads}.json"
