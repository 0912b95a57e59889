"""The best speeds that real runs have reached on this machine, which `llmrun fit` prefers to predictions.

A file next to the measured speeds of ops contains an entry for each model file, backend and number of threads. Other
programs only make a run slower, so the best speed of the last month counts, however busy the machine was.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from llmrun.backends.cpu.speeds.measured import is_recent, machine_key
from llmrun.base import folders

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.base.types import ModelInfo

CONFIRMED: Final = 3  # runs after which a speed is believed even if it is much slower than predicted
_MOST_ENTRIES: Final = 64
_MOST_FILE_BYTES: Final = 1 << 20
_ALIKE: Final = 0.9  # a run with this share of the best speed confirms it, so that it does not become too old
_REFRESHED_S: Final = 24 * 3600  # how old the time of a confirmed speed may become before it is written again


RunKey = tuple[str, int, str, str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """The best speeds of one model file in tokens per second, 0.0 if unknown.

    file        the real path of the model's first file
    file_bytes  the size of all its files
    gpu_layers  as in ModelInfo
    count       the number of runs, up to CONFIRMED
    at          when the speeds were last reached, in seconds since 1970
    """

    file: str
    file_bytes: int
    backend: str
    gpu_layers: str
    threads: int
    decode: float = 0.0
    prefill: float = 0.0
    count: int = 0
    at: float = 0.0

    @property
    def key(self) -> RunKey:
        return self.file, self.file_bytes, self.backend, self.gpu_layers, self.threads


_EMPTY: Final = Run("", 0, "", "", 0)


def run_key(path: str | Path, file_bytes: int, backend: str, gpu_layers: str, threads: int) -> RunKey:
    """Return the key of a model's entry. If a GPU has layers, the number of threads does not matter."""
    return os.path.realpath(path), file_bytes, backend, gpu_layers, 0 if gpu_layers else threads


def kept_runs() -> dict[RunKey, Run]:
    """Return the recent runs by key, or {} if the file is missing, damaged or from another machine or version."""
    path = _path()
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            return {}
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["machine"] != machine_key(0):
            return {}
        runs = [Run(**{name: _checked(name, value) for name, value in each.items()}) for each in body["runs"]]
        return {run.key: run for run in runs if is_recent(run.at)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _checked(name: str, value: Any) -> Any:
    kind = type(getattr(_EMPTY, name))
    if type(value) is not kind or (kind is float and not 0 <= value < math.inf):
        raise ValueError(name)
    return value


def keep_run(info: ModelInfo, decode: float, prefill: float) -> None:
    """Record the speeds of a run, 0.0 if unknown. Write nothing if the file already says so, or cannot be written."""
    if info.adapters:
        return
    key = run_key(info.path, info.file_bytes, info.backend, info.gpu_layers, info.threads)
    runs, now = kept_runs(), time.time()
    old = runs.get(key, Run(*key))
    best = replace(
        old, decode=max(old.decode, decode), prefill=max(old.prefill, prefill), count=min(old.count + 1, CONFIRMED)
    )
    is_confirmed = decode >= _ALIKE * old.decode and now - old.at > _REFRESHED_S
    if best == old and not is_confirmed:
        return
    runs[key] = replace(best, at=now if decode >= _ALIKE * old.decode else old.at)
    kept = sorted(runs.values(), key=lambda run: run.at)[-_MOST_ENTRIES:]
    _write(kept)


def _write(runs: list[Run]) -> None:
    body: Mapping[str, Any] = {"machine": machine_key(0), "runs": [asdict(run) for run in runs]}
    with contextlib.suppress(OSError):  # without the file, speeds are predicted
        folders.write_whole(_path(), json.dumps(body).encode())


def _path() -> Path:
    return folders.cache_folder("speeds") / "runs.json"
