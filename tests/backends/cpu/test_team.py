"""Tests of the thread team: it meets at every barrier, stops when told, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.lower import lower
from llmrun.backends.cpu.lowering import Lowered
from llmrun.backends.cpu.team import Team
from llmrun.backends.cpu.weights import reserve
from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.formats.layouts import records
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.plan import Plan
from tests.support.backends.filled_weights import fill
from tests.support.kernels.runs import matrix_of

pytestmark = pytest.mark.push

WIDTH = 64
PERMUTATION = np.random.default_rng(0).permutation(WIDTH)


def lowered_chain(length: int, threads: int, *, max_rows: int = 64, width: int = WIDTH) -> Lowered:
    """Return a lowered plan that permutes the columns of 100 integer rows `length` times, with a barrier after each.

    A thread that runs ahead of the others would permute values that are not yet written.
    """
    table = np.arange(100 * width, dtype=np.float32).reshape(100, width)
    permutation = np.eye(width, dtype=np.float32)[np.random.default_rng(0).permutation(width)]
    plan = Plan()
    x = plan.embed(Matrix.of_bytes("table", "f32", 100, width, table.view(np.uint8).reshape(-1)))
    permute = matrix_of("f32", permutation, "permute")
    for _ in range(length - 1):
        x = plan.linear(x, permute)
    plan.output(x, permute)
    packed = reserve(plan.matrices)
    fill(packed, 1)
    lowered = lower(plan, packed, [], kv_type="f16", max_rows=max_rows, n_threads=threads)
    lowered.link()
    return lowered


def expected(tokens: NDArray[np.int32], length: int) -> NDArray[np.float32]:
    rows = np.arange(100 * WIDTH, dtype=np.float32).reshape(100, WIDTH)[tokens]
    for _ in range(length):
        rows = rows[:, PERMUTATION]
    return rows


def run(team: Team, tokens: NDArray[np.int32], logits: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Run one step. Logits stay NaN until the last op has written them."""
    if logits is None:
        logits = not_written(len(tokens))
    rows = np.arange(len(tokens), dtype=np.int32)
    team.run(tokens, rows, np.zeros(len(tokens), np.int64), rows, np.zeros((len(tokens), 0, 2), np.float32), logits)
    return logits


def run_often(team: Team, tokens: NDArray[np.int32]) -> None:
    for _ in range(100):
        run(team, tokens)


def not_written(rows: int, width: int = WIDTH) -> NDArray[np.float32]:
    return np.full((rows, width), np.nan, np.float32)


@contextmanager
def team_of(threads: int, length: int = 8, *, width: int = WIDTH) -> Iterator[Team]:
    team = Team(lowered_chain(length, threads, width=width), threads)
    try:
        yield team
    finally:
        team.close()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("llmrun-")]


# --- barriers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_no_thread_passes_a_barrier_before_the_others(threads: int) -> None:
    """Covers thousands of barriers, in steps of one row (where each thread runs some ops itself) and of many rows."""
    random = np.random.default_rng(threads)
    with team_of(threads) as team:
        for step in range(600):
            tokens = random.integers(0, 100, 1 if step % 2 else random.integers(2, 20)).astype(np.int32)
            np.testing.assert_array_equal(run(team, tokens), expected(tokens, 8))


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_sleep_at_once_are_all_woken(threads: int) -> None:
    """Spinning is disabled, so every barrier and every step sleeps and wakes."""
    random = np.random.default_rng(threads)
    with mock.patch("llmrun.backends.cpu.team._SPIN_SECONDS", 0), team_of(threads) as team:
        for _ in range(300):
            tokens = random.integers(0, 100, 3).astype(np.int32)
            np.testing.assert_array_equal(run(team, tokens), expected(tokens, 8))


def test_the_spin_lasts_about_as_long_on_every_processor() -> None:
    """A pause takes between 0.5 ns (as a plain instruction) and 0.5 us (on a busy machine)."""
    with team_of(1) as team:
        pauses = team._sync[records.SYNC_SPIN // records.WORD]
    assert 10 <= pauses <= 10_000
    with mock.patch("llmrun.backends.cpu.team._SPIN_SECONDS", 1e-3), team_of(1) as team:
        assert team._sync[records.SYNC_SPIN // records.WORD] > 10 * pauses


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_without_a_futex_threads_give_way(threads: int) -> None:
    with mock.patch("llmrun.backends.cpu.team._FUTEX_CALLS", {}), team_of(threads) as team:
        for count in (1, 5, 1, 2):
            tokens = np.arange(count, dtype=np.int32)
            np.testing.assert_array_equal(run(team, tokens), expected(tokens, 8))


def test_two_teams_work_side_by_side() -> None:
    results: dict[int, bool] = {}

    def use(index: int) -> None:
        tokens = np.arange(index, index + 5, dtype=np.int32)
        with team_of(2) as team:
            results[index] = all(np.array_equal(run(team, tokens), expected(tokens, 8)) for _ in range(100))

    threads = [threading.Thread(target=use, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True}


# --- stopping -------------------------------------------------------------------------------------------------------

LONG = 3000  # barriers in a step that is long enough to stop
WIDE = 256


def when_running(team: Team, act: Callable[[], None]) -> threading.Thread:
    """Call `act` from another thread while the workers are in the middle of a step."""
    counters = team._lowered.counters

    def watch() -> None:
        deadline = time.monotonic() + 60
        while counters[20, 0] == 0:
            assert time.monotonic() < deadline, "the step never came so far"
        act()

    counters[:] = 0
    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.night
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_cancelled_step_stops_at_a_barrier(threads: int) -> None:
    tokens = np.arange(64, dtype=np.int32)
    with team_of(threads, LONG, width=WIDE) as team:
        logits = not_written(64, WIDE)
        canceller = when_running(team, team.cancel)
        with pytest.raises(Cancelled):
            run(team, tokens, logits)
        canceller.join()
        assert np.isnan(logits).all(), "the last op was never reached"
        assert team._lowered.counters[-1, 0] == 0
        team.clear_cancel()
        run(team, tokens, logits)
        np.testing.assert_array_equal(run(team, tokens, not_written(64, WIDE)), logits)


def test_cancelling_before_a_step_stops_it() -> None:
    with team_of(2) as team:
        team.cancel()
        with pytest.raises(Cancelled):
            run(team, np.arange(3, dtype=np.int32))
        team.clear_cancel()
        tokens = np.arange(3, dtype=np.int32)
        np.testing.assert_array_equal(run(team, tokens), expected(tokens, 8))


class Interrupt(BaseException):
    """The exception that the test's signal handler raises."""


@pytest.mark.night
def test_an_exception_from_a_signal_handler_waits_for_the_workers() -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")

    def raise_interrupt(number: int, frame: object) -> None:
        raise Interrupt

    tokens = np.arange(64, dtype=np.int32)
    before = signal.signal(signal.SIGUSR1, raise_interrupt)
    try:
        with team_of(2, LONG, width=WIDE) as team:
            sender = when_running(team, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            logits = not_written(64, WIDE)
            with pytest.raises(Interrupt):
                run(team, tokens, logits)
            sender.join()
            assert_at_rest(team)
            assert np.isnan(logits).all()
            team.clear_cancel()
            assert np.isfinite(run(team, tokens, logits)).all()
    finally:
        signal.signal(signal.SIGUSR1, before)


def assert_at_rest(team: Team) -> None:
    step, done = (int(team._sync[word // records.WORD]) for word in (records.SYNC_STEP, records.SYNC_DONE))
    assert step == done


class Interrupted:
    """A stand-in for a kernel of the main thread that raises in some of its calls, as a signal handler may."""

    def __init__(self, kernel: object, before: int = 0, after: int = 0) -> None:
        self._kernel, self._before, self._after = kernel, before, after

    def run(self, *words: int) -> None:
        if self._before:
            self._before -= 1
            raise Interrupt
        self._kernel.run(*words)  # type: ignore[attr-defined]
        if self._after:
            self._after -= 1
            raise Interrupt


@pytest.mark.parametrize(
    ("kernel", "before", "after"),
    [
        ("_start", 1, 0),
        ("_start", 0, 1),
        ("_wait", 1, 0),
        ("_wait", 5, 0),
        ("_wait", 0, 5),
    ],
)
def test_whenever_the_signals_come_the_workers_are_at_rest(kernel: str, before: int, after: int) -> None:
    tokens = np.arange(20, dtype=np.int32)
    with team_of(2, 100) as team:
        real = getattr(team, kernel)
        setattr(team, kernel, Interrupted(real, before, after))
        with pytest.raises(Interrupt):
            run_often(team, tokens)  # `wait` is not called when the workers finish first
        setattr(team, kernel, real)
        assert_at_rest(team)
        team.clear_cancel()
        np.testing.assert_array_equal(run(team, tokens), expected(tokens, 100))


# --- ending -----------------------------------------------------------------------------------------------------------


def test_close_ends_the_threads_and_may_be_called_twice() -> None:
    before = workers()
    team = Team(lowered_chain(3, 4), 4)
    assert len(workers()) == len(before) + 4
    run(team, np.arange(3, dtype=np.int32))
    team.close()
    assert workers() == before
    team.close()


def test_a_closed_team_says_so() -> None:
    with team_of(2) as team:
        team.close()
        with pytest.raises(LlmrunError, match="closed"):
            run(team, np.arange(3, dtype=np.int32))


def test_a_forgotten_team_ends_its_threads() -> None:
    before = workers()
    team = Team(lowered_chain(3, 3), 3)
    run(team, np.arange(3, dtype=np.int32))
    del team
    gc.collect()
    assert workers() == before


def test_a_team_that_cannot_be_whole_leaves_no_threads() -> None:
    before = workers()
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    lowered = lowered_chain(3, 4)
    with mock.patch.object(threading.Thread, "start", start), pytest.raises(RuntimeError, match="new thread"):
        Team(lowered, 4)
    assert workers() == before


PROGRAM = """
import os, sys, threading
import numpy as np
from llmrun.base.errors import LlmrunError
from llmrun.backends.cpu.team import Team
from tests.backends.cpu.test_team import LONG, WIDE, expected, lowered_chain, not_written, run, when_running
tokens = np.arange(5, dtype=np.int32)
team = Team(lowered_chain(8, 2), 2)
assert np.array_equal(run(team, tokens), expected(tokens, 8))
"""


def run_program(ending: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + ending]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.night
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("threading.excepthook = team", 0),
        ("keep = [team]; keep.append(keep)", 0),
    ],
)
def test_a_process_may_end_without_closing(ending: str, code: int) -> None:
    done = run_program(ending)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.night
def test_a_process_may_end_in_the_middle_of_a_step() -> None:
    """The workers finish the step, and no memory is freed while they use it."""
    done = run_program(
        """
busy = Team(lowered_chain(LONG, 2, width=WIDE), 2)
running = threading.Event()
when_running(busy, running.set)
threading.Thread(target=run, args=(busy, np.arange(64, dtype=np.int32), not_written(64, WIDE)), daemon=True).start()
running.wait()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.night
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_refuses_and_its_parent_goes_on() -> None:
    done = run_program(
        """
child = os.fork()
if not child:
    try:
        run(team, tokens)
    except LlmrunError as error:
        team.close()
        sys.exit(17 if "forked process" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert np.array_equal(run(team, tokens), expected(tokens, 8))
"""
    )
    assert done.returncode == 0, done.stderr
