"""Predicts how long prompts take before a model has run a step, from the costs of earlier runs or from a forecast.

Importing this module is fast. Predictions from earlier runs do not import NumPy.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmrun.backends.run_speeds import LearntCosts, costs_of, kept_costs
from llmrun.base.errors import LlmrunError

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo

_ROWS: Final = 256  # prompt rows in a step
_STEP_IN_ROWS: Final = 8.0  # the assumed time to read the weights, in rows
_SHORT, _LONG = 512, 8192  # the lengths of the prompts whose times are forecast
_SHARD: Final = "-00001-of-"  # in the name of the first file of several


def predicted_prompt_s(
    model_path: Path, tokens: int, cached: int = 0, threads: int | None = None, *, may_measure: bool = False
) -> float | None:
    """Return the seconds that a prompt takes on an idle machine, or None if that is unknown.

    cached       how many of its tokens are in the KV cache
    threads      number of CPU threads, or None for the default
    may_measure  measure the speeds that a forecast needs, which takes some seconds, and store them

    The prediction follows the last run of the model file with this number of threads. Without such a run, the time is
    forecast, which takes a few tenths of a second.
    """
    from llmrun.base.machine.cpu_count import default_threads

    threads = threads or default_threads()
    costs = _kept(model_path, threads) or _forecast(model_path, threads, None, may_measure=may_measure)
    return None if costs is None else costs.prompt_s(tokens, min(cached, tokens - 1), _ROWS)


def assumed_costs(info: ModelInfo, *, may_forecast: bool) -> LearntCosts | None:
    """Return the costs that an open model's steps will probably have, or None. Nothing is measured.

    may_forecast  forecast the costs if no run has recorded any, which takes about 0.2 s
    """
    if (costs := costs_of(info)) is not None or not may_forecast or info.backend != "cpu":
        return costs
    return _forecast(Path(info.path), info.threads, info.kv_type, may_measure=False)


def _kept(path: Path, threads: int) -> LearntCosts | None:
    """Return the latest costs of a model file, whatever the backend and the precision of the KV cache."""
    real = os.path.realpath(path)
    try:
        size = path.stat().st_size
    except OSError:
        return None
    found = [
        entry
        for entry in kept_costs().values()
        if entry.file == real
        and (entry.file_bytes == size or (_SHARD in real and entry.file_bytes > size))
        and (entry.gpu_layers or entry.threads == threads)
        and entry.costs.prompts
    ]
    return max(found, key=lambda entry: entry.at).costs if found else None


def _forecast(path: Path, threads: int, kv_type: str | None, *, may_measure: bool) -> LearntCosts | None:
    """Return costs with which prompts take as long as forecast for our own engine, or None if there is no forecast."""
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.experience import Experience
    from llmrun.backends.registry import backend_named
    from llmrun.formats.gguf.reader import open_gguf

    entry = backend_named("cpu")
    assert entry is not None
    speeds, options = Speeds.of_this_machine(threads), OpenOptions(threads=threads, kv_type=kv_type)
    seconds: list[float] = []
    try:
        with nullcontext() if may_measure else speeds.only_known(), open_gguf(path) as file:
            for prompt in (_SHORT, _LONG):
                found = entry.kind().forecast(file, options, speeds, prompt)
                if found is None or not found.prefill_per_second or not found.decode_per_second:
                    return None
                seconds.append(prompt / found.prefill_per_second)
            if may_measure:
                speeds.keep()
        factor = Experience(threads, speeds).factors()[1]
    except (LlmrunError, LookupError, OSError):
        return None  # the model cannot run, or ops that it needs have not been measured
    # The times of both prompts determine the cost of a row and the cost of attention.
    unit = LearntCosts((_STEP_IN_ROWS, 1.0, 0.0, 0.0)), LearntCosts((0.0, 0.0, 0.0, 1.0))
    (row_1, attended_1), (row_2, attended_2) = (
        [costs.prompt_s(prompt, 0, _ROWS) for costs in unit] for prompt in (_SHORT, _LONG)
    )
    attended = (seconds[1] * row_1 - seconds[0] * row_2) / (attended_2 * row_1 - attended_1 * row_2)
    attended = max(attended, 0.0)
    row = (seconds[0] - attended * attended_1) / row_1
    if row <= 0:
        return None
    prompts = tuple(cost / factor for cost in (_STEP_IN_ROWS * row, row, 0.0, attended))
    return LearntCosts(prompts, rows=_ROWS, attended=_ROWS * _LONG)
