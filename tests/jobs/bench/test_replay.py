"""Tests that replay whole runs, recorded and simulated, through the stopping rule and the verdict.

scripts/record_timings.py records the turns. Both metrics of a run are judged, at the level that they share. A run
claims a difference when either metric does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llmrun.jobs.bench import statistics
from llmrun.jobs.bench.statistics import are_narrow

pytestmark = pytest.mark.push

RECORDING = Path(__file__).parents[2] / "data" / "bench_timings.json"
ENGINES = ("llmrun", "llama.cpp")
METRICS = ("prefill", "decode")
COLD = 4  # warm-up rounds of a run

Array = npt.NDArray[np.float64]
Turns = dict[str, Array]  # for one configuration: milliseconds per turn, by metric


@lru_cache
def recorded(engine: str) -> tuple[Turns, Turns]:
    """Return every session of an engine, concatenated without the cold rounds."""
    sessions = [one for one in json.loads(RECORDING.read_text())["sessions"] if one["engine"] == engine]
    a, b = ({m: np.concatenate([one[name][m][COLD:] for one in sessions]) for m in METRICS} for name in "ab")
    return a, b


def windows(engine: str, count: int) -> Iterator[tuple[Turns, Turns]]:
    """Yield the recording rotated to `count` evenly spaced starting points, so that neighbors stay neighbors."""
    a, b = recorded(engine)
    rounds = len(a["decode"])
    for start in range(count):
        first = start * rounds // count // 2 * 2  # the start of an A B round
        yield tuple({m: np.roll(turns[m], -first) for m in METRICS} for turns in (a, b))  # type: ignore[misc]


def made(seed: int, rounds: int = 240, noise: float = 0.03) -> tuple[Turns, Turns]:
    """Return simulated turns with heavy tails, bursts, autocorrelation, drift, and first turns that are 4 % slower."""
    random = np.random.default_rng(seed)
    a: Turns = {}
    b: Turns = {}
    for metric in METRICS:
        turns = 2 * rounds
        log = noise * random.standard_t(3, turns) + 0.2 * np.sin(np.arange(turns) / random.uniform(10, 50))
        for start in np.flatnonzero(random.random(turns) < 0.03):
            log[start : start + random.geometric(0.25)] += np.log(random.uniform(1.1, 1.9))
        memory = 0.0
        for turn in range(turns):
            memory = 0.8 * memory + 0.6 * noise * random.standard_normal()
            log[turn] += memory
        log[0::2] += 0.04
        swapped = np.arange(rounds) % 2 == 1
        by_round = np.exp(log).reshape(rounds, 2)
        a[metric] = np.where(swapped, by_round[:, 1], by_round[:, 0])
        b[metric] = np.where(swapped, by_round[:, 0], by_round[:, 1])
    return a, b


def replayed(a: Turns, b: Turns, slower: float = 1.0) -> tuple[int, list[statistics.Interval]]:
    """Return the number of rounds until the run stops, and the interval of a over b for each metric.

    The end of the recording is the time limit.
    """
    total = len(a["decode"])
    for rounds in range(1, total + 1):
        samples = [
            {metric: a[metric][:rounds].tolist() for metric in METRICS},
            {metric: (slower * b[metric][:rounds]).tolist() for metric in METRICS},
        ]
        if are_narrow(samples, [(0, 1)], METRICS):
            break
    level = statistics.verdict_level(len(METRICS))
    return rounds, [
        statistics.paired_ratio(samples[0][metric], samples[1][metric], is_speed=False, level=level)
        for metric in METRICS
    ]


def claims(verdicts: list[statistics.Interval]) -> bool:
    return any(not one.low <= 1 <= one.high for one in verdicts)


def test_the_recording_holds_300_rounds_of_each_engine() -> None:
    assert all(len(recorded(engine)[0]["decode"]) >= 300 for engine in ENGINES)


@pytest.mark.night
def test_recorded_twins_are_told_apart_at_most_twice_in_40_runs() -> None:
    runs = [pair for engine in ENGINES for pair in windows(engine, 20)]
    assert sum(claims(replayed(a, b)[1]) for a, b in runs) <= 2


@pytest.mark.night
@pytest.mark.parametrize("engine", ENGINES)
def test_5_percent_are_found_in_9_of_10_recorded_runs(engine: str) -> None:
    """A run finds the difference when both metrics say that a is faster."""
    found = [all(one.low > 1 for one in replayed(a, b, slower=1.05)[1]) for a, b in windows(engine, 20)]
    assert sum(found) >= 18


@pytest.mark.night
def test_made_twins_are_told_apart_at_most_twice_in_40_runs() -> None:
    assert sum(claims(replayed(*made(seed))[1]) for seed in range(40)) <= 2


@pytest.mark.night
def test_5_percent_are_found_in_9_of_10_made_runs() -> None:
    found = [all(one.low > 1 for one in replayed(*made(seed), slower=1.05)[1]) for seed in range(20)]
    assert sum(found) >= 18
