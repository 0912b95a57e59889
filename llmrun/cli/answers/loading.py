"""Shows which model is being loaded, how large the model is, and how long it took to load last time.

The line appears before NumPy and the engine are imported, because these imports take longer than all earlier work. The
duration of the last load of each model is stored in a small file in the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from pathlib import Path

from llmrun.base.amounts import format_bytes, format_seconds_roughly
from llmrun.base.folders import cache_folder, write_whole
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import columns, shortened, width

_ALWAYS = "loading"  # backends report the work of every load with words that begin like this, and other work only once
_MOST = 200  # maximum number of stored durations


class ModelLoading:
    """The progress line of a model that is being loaded. Backends call the object to report their progress.

    `began` is the moment of `time.perf_counter` at which the load began.
    """

    def __init__(self, name: str, path: Path) -> None:
        """Prepare the line for the model whose first file is `path`. `begin` shows the line."""
        self._name = name
        self._path = path
        self._key = self._label = ""
        self._is_first = False
        self.began = time.perf_counter()

    def begin(self) -> None:
        """Show the line. The duration of the load is measured from this call."""
        from llmrun.hub.local.paths import model_files  # clients of a background engine do not need the hub

        self.began, self._is_first = time.perf_counter(), False
        try:
            size = sum(path.stat().st_size for path in model_files(self._path))
            self._key = _key_of(self._path)
        except OSError:
            return  # the code that opens the file will report the error
        last = _durations().get(self._key)
        words = "" if last is None else f", {format_seconds_roughly(last)} last time"
        self._label = f"loading {self._name} ({format_bytes(size)}{words})"
        out.progress(f"{self._label} ...", at_once=True)

    def __call__(self, what: str, fraction: float) -> None:
        """Show the progress: what the backend is doing, and how much of it is done."""
        if what.startswith(_ALWAYS):
            out.progress(f"{shortened(self._label or what, columns() - 8)}  {fraction:.0%}")
            return
        self._is_first = True
        line = f"{self._name}: {what}"
        out.progress(line if width(line) < columns() else what)

    def end(self) -> None:
        """Erase the line. Store the duration of the load, unless the load included work that is done only once."""
        out.clear_progress()
        if self._key and not self._is_first:
            durations = _durations()
            durations.pop(self._key, None)
            durations[self._key] = round(time.perf_counter() - self.began, 3)
            with contextlib.suppress(OSError):  # the cache folder is not writable
                write_whole(_file(), json.dumps(dict(list(durations.items())[-_MOST:])).encode())


def _file() -> Path:
    return cache_folder("load-times.json")


def _key_of(path: Path) -> str:
    """Return a key that identifies a file until the file changes. Raises OSError."""
    status = path.stat()
    identity = f"{os.path.realpath(path)}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _durations() -> dict[str, float]:
    """Return the durations of loads in seconds by the models' keys, the latest last. Invalid files count as empty."""
    from llmrun.hub.local.paths import read_small

    try:
        stored = json.loads(read_small(_file()))
        return {str(key): float(seconds) for key, seconds in stored.items() if 0 <= seconds < math.inf}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
