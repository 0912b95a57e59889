"""What real runs have shown on this machine: the best speeds of each model, and the costs of its steps.

A file next to the measured speeds of ops contains entries for each model file, backend and number of threads. `llmrun
fit` prefers the best speeds to predictions. Other programs only make a run slower, so the best speed of the last month
counts, however busy the machine was. The costs of steps, from the engine's `StepCosts`, predict how long prompts take.
They are those of the last run, and there is an entry for each precision of the KV cache.
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

from llmrun.base import folders
from llmrun.base.compiled.host import machine_key
from llmrun.base.folders import is_recent

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.base.types import ModelInfo

CONFIRMED: Final = 3  # runs after which a speed is believed even if it is much slower than predicted
_MOST_ENTRIES: Final = 64  # of each kind
_MOST_FILE_BYTES: Final = 1 << 20
_N_COSTS: Final = 4
_LONGEST_COST: Final = 1e4  # seconds
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


@dataclass(frozen=True, slots=True)
class LearntCosts:
    """The costs of steps, in seconds, as `StepCosts` has learnt them.

    prompts   the costs of steps with prompts: of each step, of each row, of 1,024 tokens in the cache, and of 1,024
              tokens that a row attends to; () if unknown
    answers   the same for steps without prompts
    rows      the most prompt rows of a step
    attended  the largest StepSize.attended of a step with prompts
    drafted   the most draft tokens of a step
    """

    prompts: tuple[float, ...]
    answers: tuple[float, ...] = ()
    rows: int = 0
    attended: int = 0
    drafted: int = 0

    def prompt_s(self, tokens: int, cached: int, rows_per_step: int) -> float:
        """Return the seconds of a prompt that runs alone, if steps of `rows_per_step` rows take less than 2 s.

        At great depths, steps have fewer rows, which costs a few percent more.
        """
        step, row, read, attended = self.prompts
        starts = range(cached, tokens, rows_per_step)
        pairs = tokens * tokens / 2 - cached * cached / 2 - (tokens - cached) * min(rows_per_step, tokens - cached) / 2
        return step * len(starts) + row * (tokens - cached) + (read * sum(starts) + attended * pairs) / 1024


CostsKey = tuple[str, int, str, str, int, str]


@dataclass(frozen=True, slots=True)
class CostsEntry:
    """The costs of one model file, and when a run has recorded them. The first fields are those of Run."""

    file: str
    file_bytes: int
    backend: str
    gpu_layers: str
    threads: int
    kv_type: str
    costs: LearntCosts
    at: float

    @property
    def key(self) -> CostsKey:
        return self.file, self.file_bytes, self.backend, self.gpu_layers, self.threads, self.kv_type


def run_key(path: str | Path, file_bytes: int, backend: str, gpu_layers: str, threads: int) -> RunKey:
    """Return the key of a model's entry. If a GPU has layers, the number of threads does not matter."""
    return os.path.realpath(path), file_bytes, backend, gpu_layers, 0 if gpu_layers else threads


def kept_runs() -> dict[RunKey, Run]:
    """Return the recent runs by key, or {} if the file is missing, damaged or from another machine or version."""
    try:
        runs = [Run(**{name: _checked(name, value) for name, value in each.items()}) for each in _body()["runs"]]
        return {run.key: run for run in runs if is_recent(run.at)}
    except _DAMAGES:
        return {}


def kept_costs() -> dict[CostsKey, CostsEntry]:
    """Return the recent costs by key, or {} if the file is missing, damaged or from another machine or version."""
    try:
        entries = [_entry(each) for each in _body()["costs"]]
        return {entry.key: entry for entry in entries if is_recent(entry.at)}
    except _DAMAGES:
        return {}


_DAMAGES: Final = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


def _body() -> dict[str, Any]:
    """Return the file's contents. Raises one of _DAMAGES."""
    path = _path()
    if path.stat().st_size > _MOST_FILE_BYTES:
        raise ValueError(path)
    body = json.loads(path.read_text(encoding="utf-8"))
    if body["machine"] != machine_key(0):
        raise ValueError(body["machine"])
    return dict(body)


def _checked(name: str, value: Any) -> Any:
    kind = type(getattr(_EMPTY, name))
    if type(value) is not kind or (kind is float and not 0 <= value < math.inf):
        raise ValueError(name)
    return value


def _entry(values: dict[str, Any]) -> CostsEntry:
    costs = LearntCosts(**values["costs"])
    sizes = costs.rows, costs.attended, costs.drafted
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in sizes) or type(values["kv_type"]) is not str:
        raise ValueError(values)
    key = {
        name: _checked(name, values[name]) for name in ("file", "file_bytes", "backend", "gpu_layers", "threads", "at")
    }
    checked = replace(costs, prompts=_checked_costs(costs.prompts), answers=_checked_costs(costs.answers))
    return CostsEntry(**key, kv_type=values["kv_type"], costs=checked)


def _checked_costs(costs: Any) -> tuple[float, ...]:
    """Return the costs of a kind of step as a tuple. The costs of a step and of a row cannot both be 0."""
    if not all(type(cost) is float and 0 <= cost < _LONGEST_COST for cost in costs):
        raise ValueError(costs)
    if costs and (len(costs) != _N_COSTS or not costs[0] + costs[1]):
        raise ValueError(costs)
    return tuple(costs)


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
    _write(runs, kept_costs())


def costs_of(info: ModelInfo) -> LearntCosts | None:
    """Return the costs of a model's last run, or None."""
    entry = kept_costs().get(_costs_key(info))
    return None if entry is None or info.adapters else entry.costs


def keep_costs(info: ModelInfo, costs: LearntCosts) -> None:
    """Record the costs of a model's steps, or do nothing if the file cannot be written."""
    if info.adapters:
        return
    key = _costs_key(info)
    _write(kept_runs(), {**kept_costs(), key: CostsEntry(*key, costs, time.time())})


def _costs_key(info: ModelInfo) -> CostsKey:
    return *run_key(info.path, info.file_bytes, info.backend, info.gpu_layers, info.threads), info.kv_type


def _write(runs: Mapping[RunKey, Run], costs: Mapping[CostsKey, CostsEntry]) -> None:
    body: Mapping[str, Any] = {"machine": machine_key(0), "runs": _latest(runs), "costs": _latest(costs)}
    with contextlib.suppress(OSError):  # without the file, speeds are predicted
        folders.write_whole(_path(), json.dumps(body).encode())


def _latest(entries: Mapping[RunKey, Run] | Mapping[CostsKey, CostsEntry]) -> list[dict[str, Any]]:
    values: list[Run | CostsEntry] = [*entries.values()]
    return [asdict(entry) for entry in sorted(values, key=lambda entry: entry.at)[-_MOST_ENTRIES:]]


def _path() -> Path:
    return folders.cache_folder("speeds") / "runs.json"
