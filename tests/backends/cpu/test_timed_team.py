"""Tests of the timed team: it times every op, returns the normal team's results, and stops when told."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from llmrun.backends.cpu.lowering import Lowered
from llmrun.backends.cpu.timed_team import StepTimes, TimedTeam
from llmrun.base.errors import Cancelled
from llmrun.formats.layouts import records
from tests.backends.cpu.test_team import (
    LONG,
    WIDE,
    assert_at_rest,
    expected,
    lowered_chain,
    not_written,
    run,
    team_of,
    when_running,
    workers,
)

pytestmark = pytest.mark.push

LENGTH = 8


@contextmanager
def timed_team_of(lowered: Lowered, threads: int) -> Iterator[TimedTeam]:
    team = TimedTeam(lowered, threads)
    try:
        yield team
    finally:
        team.close()


def total(times: StepTimes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the seconds each thread spent."""
    return np.asarray((times.working + times.waiting).sum(axis=1))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 30])
def test_every_op_has_a_time_and_all_together_no_more_than_the_step(threads: int, count: int) -> None:
    with timed_team_of(lowered_chain(LENGTH, threads), threads) as team:
        for _ in range(20):
            begun = time.perf_counter()
            run(team, np.arange(count, dtype=np.int32))
            taken = time.perf_counter() - begun
            [times] = team.taken_times()
            assert times.working.shape == times.waiting.shape == (threads, 1 + LENGTH)
            assert (times.working > 0).all()
            # A barrier follows each op except the first, which in steps of one row each thread runs on its own copy.
            assert (times.waiting[:, 1:] > 0).all()
            assert (times.waiting[:, 0] > 0).all() == (count > 1)
            assert (total(times) < taken).all()


def test_the_stamps_themselves_rise() -> None:
    if sys.platform == "win32":
        pytest.skip("needs clock_gettime")
    with timed_team_of(lowered_chain(LENGTH, 2), 2) as team:
        run(team, np.arange(30, dtype=np.int32))
        nanoseconds = team._stamps[:, :, 0] * 10**9 + team._stamps[:, :, 1]
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert nanoseconds.shape == (2, 1 + 2 * (1 + LENGTH))
    assert (np.diff(nanoseconds, axis=1) > 0).all()
    assert (now - 60 * 10**9 < nanoseconds).all()
    assert (nanoseconds < now).all()


def test_no_thread_passes_a_barrier_before_the_last_has_come() -> None:
    with timed_team_of(lowered_chain(LENGTH, 3), 3) as team:
        for _ in range(50):
            run(team, np.arange(30, dtype=np.int32))
            ticks = team._stamps[:, :, 0] * 10**9 + team._stamps[:, :, 1]
            came, passed = ticks[:, 1::2], ticks[:, 2::2]
            assert (passed >= came.max(axis=0)).all()


def test_where_no_barrier_follows_nobody_waits() -> None:
    lowered = lowered_chain(LENGTH, 2)
    flags = lowered.records[:, records.OP_FLAGS // records.WORD]
    flags[3] &= ~records.FLAG_BARRIER
    flags[5] |= records.FLAG_REPLICATED
    with timed_team_of(lowered, 2) as team:
        for count, without in ((30, [3]), (1, [0, 3, 5])):  # in a step of one row, each thread looks up its own copy
            run(team, np.arange(count, dtype=np.int32))
            [times] = team.taken_times()
            waited = (times.waiting > 0).all(axis=0)
            assert np.flatnonzero(~waited).tolist() == without
            assert (times.working > 0).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_are_those_of_the_normal_team(threads: int) -> None:
    with team_of(threads, LENGTH) as normal, timed_team_of(lowered_chain(LENGTH, threads), threads) as timed:
        for count in (1, 2, 17, 1):
            tokens = np.arange(count, dtype=np.int32)
            np.testing.assert_array_equal(run(timed, tokens), run(normal, tokens))
            np.testing.assert_array_equal(run(timed, tokens), expected(tokens, LENGTH))


def test_times_are_told_once_in_the_order_of_the_steps() -> None:
    with timed_team_of(lowered_chain(LENGTH, 2), 2) as team:
        assert team.taken_times() == []
        for count in (1, 64) * 20:
            run(team, np.arange(count, dtype=np.int32))
        working = [times.working.sum() for times in team.taken_times()]
        assert len(working) == 40
        assert min(working[::2]) < min(working[1::2])  # compare the minimums, because any step may be delayed
        assert team.taken_times() == []


@pytest.mark.night
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_cancelled_step_stops_and_has_no_times(threads: int) -> None:
    tokens = np.arange(64, dtype=np.int32)
    with timed_team_of(lowered_chain(LONG, threads, width=WIDE), threads) as team:
        logits = not_written(64, WIDE)
        canceller = when_running(team, team.cancel)
        with pytest.raises(Cancelled):
            run(team, tokens, logits)
        canceller.join()
        assert_at_rest(team)
        assert np.isnan(logits).all()
        assert team.taken_times() == []
        team.clear_cancel()
        run(team, tokens, logits)
        [times] = team.taken_times()
        assert (times.working > 0).all()


def test_it_ends_its_threads() -> None:
    before = workers()
    with timed_team_of(lowered_chain(3, 2), 2):
        assert len(workers()) == len(before) + 2
    assert workers() == before
