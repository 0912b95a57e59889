"""Tests that the way to prefetch changes no bits, and that only a clear trial replaces the default way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.cpu import prefetching
from llmrun.backends.cpu.prefetching import WAYS, Prefetching, chosen_way, stored_times, way_in_words
from llmrun.backends.cpu.team import Team
from llmrun.formats.layouts import records
from tests.support.kernels.runs import LEVELS_HERE, random_matrix, run_linear

LARGE = 1 << 30
STEPS = 40  # more than a trial takes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prefetching, "default_way", lambda: "streams")
    return tmp_path


def run_trial(seconds_of: Callable[[str, int], float], weight_bytes: int = LARGE, rows: int = 1) -> Prefetching:
    """Run steps whose times depend on the way and on the number of the step."""
    made, names = Prefetching(2, weight_bytes), {code: name for name, code in WAYS.items()}
    for step in range(STEPS):
        made.took(rows, seconds_of(names[made.way(rows)], step))
    return made


@pytest.mark.night
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_all_ways_compute_the_same_bits(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((9, 512)).astype(np.float32)
    for kind in ("q4_0", "q6_k", "mxfp4"):
        matrix = random_matrix(kind, 1030, 512)
        for rows in (1, 3, 9):
            results = []
            for way in WAYS:
                monkeypatch.setattr(prefetching, "default_way", lambda way=way: way)
                results.append(run_linear(matrix, x[:rows], level=level, threads=2).tobytes())
            assert len(set(results)) == 1, (kind, rows)


@pytest.mark.push
@pytest.mark.parametrize("way", WAYS)
def test_kernels_are_told_the_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    run_step = Team._run_step

    def run_and_note(team: Team) -> None:
        told.append(int(team._step[records.STEP_PREFETCH // records.WORD]))
        run_step(team)

    monkeypatch.setattr(Team, "_run_step", run_and_note)
    monkeypatch.setattr(prefetching, "default_way", lambda: way)
    run_linear(random_matrix("q4_0", 64, 64), np.ones((1, 64), np.float32))
    assert told == [WAYS[way]]


@pytest.mark.parametrize("winner", WAYS)
def test_the_way_that_is_clearly_fastest_is_used_and_stored(winner: str) -> None:
    made = run_trial(lambda way, step: 0.8 if way == winner else 1.0)
    assert made.way(1) == made.way(2) == WAYS[winner]
    assert chosen_way(2) == winner
    assert chosen_way(3) == "streams"  # other numbers of threads are measured separately
    assert Prefetching(2, LARGE).way(1) == WAYS[winner]


def test_a_second_process_runs_no_trial() -> None:
    run_trial(lambda way, step: 0.8 if way == "linear" else 1.0)
    run_trial(lambda way, step: 0.1 if way == "none" else 1.0)
    assert chosen_way(2) == "linear"


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_replace_the_default(seed: int) -> None:
    """All ways are equally fast, and every fourth step takes up to ten times as long."""
    random = np.random.default_rng(seed)
    made = run_trial(lambda way, step: float(random.uniform(1, 10 if step % 4 == 0 else 1.05)))
    assert made.way(1) == WAYS["streams"]
    assert not stored_times(2)


def test_slower_steps_towards_the_end_favour_no_way() -> None:
    """The steps of an answer take longer and longer."""
    made = run_trial(lambda way, step: 1 + 0.05 * step)
    assert made.way(1) == WAYS["streams"]


def test_steps_of_several_rows_use_the_default_during_a_trial() -> None:
    made = run_trial(lambda way, step: 0.1 if way == "none" else 1.0, rows=2)
    assert made.way(2) == WAYS["streams"]
    assert not stored_times(2)


def test_small_models_run_no_trial() -> None:
    """Small models may fit in a cache, where prefetching does not matter."""
    run_trial(lambda way, step: 0.1 if way == "none" else 1.0, weight_bytes=1 << 20)
    assert not stored_times(2)


@pytest.mark.parametrize("times", [{}, {"none": 1.0}, {"none": 1.0, "linear": -1.0, "streams": 2.0}, {"a": "b"}])
def test_damaged_times_are_measured_again(cache: Path, times: dict[str, object]) -> None:
    run_trial(lambda way, step: 0.8 if way == "linear" else 1.0)
    path = cache / "speeds" / "2.json"
    body = json.loads(path.read_text())
    body["speeds"]["prefetch"] = times
    path.write_text(json.dumps(body))
    assert chosen_way(2) == "streams"
    run_trial(lambda way, step: 0.8 if way == "none" else 1.0)
    assert chosen_way(2) == "none"


def test_words_tell_the_default_from_a_measurement() -> None:
    assert "no clear measurement yet" in way_in_words(2)
    run_trial(lambda way, step: {"none": 2.0, "linear": 0.8, "streams": 1.0}[way])
    assert way_in_words(2) == (
        "weights are prefetched 4 KB ahead; measured: 60% less time per token than the slowest way (not prefetched)"
    )
