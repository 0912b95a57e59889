"""Measures a step of the CPU engine again and again, with and without timing its ops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.types import LOGITS, Batch

if TYPE_CHECKING:
    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.backends.cpu.timed_team import StepTimes, TimedTeam

_IN_A_ROW = 8  # the maximum number of consecutive steps before switching between the timed and the normal team
_LEAST_TURNS = 3
_FAR_OVER = 2.0  # Stop before _LEAST_TURNS once the time exceeds this multiple of the requested seconds.
_SETTLED = 0.98  # A step counts as faster only if it takes less than this share of the best time so far.


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The times of a step of `rows` tokens after `depth` tokens of context."""

    rows: int
    depth: int
    normal: list[float]  # seconds of each repetition
    timed: list[float]
    times: list[list[StepTimes]]  # for each timed repetition, the times of its steps


def measure_step(backend: CpuBackend, rows: int, depth: int, seconds: float) -> MeasuredStep:
    """Measure the step with and without timing the ops.

    The two variants alternate every few steps, so that changes in the machine's speed affect both.
    """
    random = np.random.default_rng(0)
    backend.kv.free(0)
    found = MeasuredStep(rows, depth, [], [], [])

    def run(team: TimedTeam | None = None) -> float:
        _go_back(random, backend, depth)
        if team is not None:
            team.taken_times()  # discard the times of steps that `_go_back` ran
        batch = _batch(random, backend, rows, depth)
        begun = time.perf_counter()
        backend.forward(batch)
        return time.perf_counter() - begun

    step = _warm(run, seconds / 4)
    in_a_row = max(1, min(_IN_A_ROW, round(seconds / 2 / _LEAST_TURNS / step)))
    # After each switch between teams, run one uncounted step while the threads wake up. Long steps do not need this.
    settles = step < seconds / 4 / _LEAST_TURNS
    begun = time.perf_counter()
    turns = 0
    while _goes_on(turns, time.perf_counter() - begun, seconds):
        turns += 1
        if settles:
            run()
        found.normal.extend(run() for _ in range(in_a_row))
        with backend.timed() as team:
            if settles:
                run()
            for _ in range(in_a_row):
                found.timed.append(run(team))
                found.times.append(team.taken_times())
    return found


def _go_back(random: np.random.Generator, backend: CpuBackend, depth: int) -> None:
    """Shorten the sequence to `depth` tokens. If the cache keeps less, run what is missing.

    The last token runs alone, so that the next step begins at a recurrent state, as it does while decoding.
    """
    kept = backend.kv.truncate(0, depth)
    for end in (depth - 1, depth):
        if kept < end:
            backend.forward(_batch(random, backend, end - kept, kept))
            kept = end


def _goes_on(turns: int, taken: float, seconds: float) -> bool:
    """Return whether to take another turn.

    At least one turn always runs. Turns continue until the requested time is up and _LEAST_TURNS have run, but stop
    earlier if that would take far longer than requested.
    """
    return turns == 0 or taken < seconds or (turns < _LEAST_TURNS and taken < _FAR_OVER * seconds)


def _warm(run: Callable[[], float], seconds: float) -> float:
    """Call `run` until three runs in a row bring no improvement or `seconds` have passed. Returns the best time."""
    begun = time.perf_counter()
    best, since = run(), 0
    while since < 3 and time.perf_counter() - begun < seconds:
        taken = run()
        since = since + 1 if taken > _SETTLED * best else 0
        best = min(best, taken)
    return best


def _batch(random: np.random.Generator, backend: CpuBackend, rows: int, start: int) -> Batch:
    """Return a batch of random tokens for one sequence that requests the logits of the last token."""
    tokens = random.integers(0, backend.info.vocabulary_size, rows).astype(np.int32)
    positions = np.arange(start, start + rows, dtype=np.int32)
    want = (positions == start + rows - 1) * np.uint8(LOGITS)
    return Batch(tokens, np.zeros(rows, np.int32), positions, want)
