"""Tests that a cancel takes effect at any moment. It is tried at every line of the engine, as a signal could arrive."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest

from llmrun.backends.scripted import ScriptedBackend, ScriptedCache
from llmrun.base.errors import Cancelled
from llmrun.base.types import Batch, FinishReason, Outputs
from llmrun.engine import answer as answer_module
from llmrun.engine import engine as engine_module
from llmrun.engine import slots as slots_module
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished
from tests.support.engine.answers import answer_all, run_to_the_end
from tests.support.engine.contract import assert_books_agree, by_thread
from tests.support.engine.scripted_models import noisy, random_request

ENGINE = {module.__file__ for module in (engine_module, slots_module, answer_module)}
Place = tuple[str, int]


@contextmanager
def at_each_line(act: Callable[[Place], None]) -> Iterator[None]:
    """Call `act` before every line of the engine that runs within the context."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in ENGINE:
            return None
        if event == "line":
            act((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Counting(ScriptedBackend):
    """A backend with a cache too small for its two sequences, which fails when it runs more passes than allowed."""

    def __init__(self) -> None:
        super().__init__(None, context_size=50, max_sequences=2, capacity=68)
        self.most_batches = sys.maxsize

    def forward(self, batch: Batch) -> Outputs:
        outputs = super().forward(batch)
        assert len(self.batches) <= self.most_batches
        return outputs


def cancel_for_good(engine: Engine, backend: Counting) -> None:
    engine.cancel_current()
    backend.most_batches = len(backend.batches)


def crowd(backend: Counting) -> tuple[Engine, list[int]]:
    """Return three requests for two sequences, which together reach every path of the engine."""
    engine = Engine(backend, rows_per_step=16)
    return engine, [engine.submit(random_request(30, seed, max_tokens=6)) for seed in range(3)]


def lines_of_a_run() -> list[Place]:
    lines: list[Place] = []
    engine, ids = crowd(Counting())
    with at_each_line(lines.append):
        run_to_the_end(engine, ids)
    return lines


def first_and_last_times() -> list[int]:
    """Return the step numbers at which each line of a run comes first and last."""
    lines = lines_of_a_run()
    firsts = {place: number for number, place in reversed(list(enumerate(lines)))}
    lasts = {place: number for number, place in enumerate(lines)}
    return sorted({*firsts.values(), *lasts.values()})


def only_once(moment: int, act: Callable[[], None]) -> Callable[[Place], None]:
    """Return a callback for `at_each_line` that acts only at step `moment`."""
    numbers = itertools.count()
    return lambda place: act() if next(numbers) == moment else None


@pytest.mark.night
def test_a_cancel_at_any_line_ends_everything_without_another_pass() -> None:
    moments = first_and_last_times()
    assert len(moments) > 150
    alone = [answer_all(Engine(noisy()), [random_request(30, seed, max_tokens=6)])[0].tokens for seed in range(3)]
    for moment in moments:
        backend = Counting()
        engine, ids = crowd(backend)
        with at_each_line(only_once(moment, partial(cancel_for_good, engine, backend))):
            answers = run_to_the_end(engine, ids)
        for gathered, tokens in zip(answers, alone, strict=True):
            assert gathered.tokens == tokens[: len(gathered.tokens)]
            whole = len(gathered.tokens) == 6
            assert gathered.finished.reason is (FinishReason.LENGTH if whole else FinishReason.CANCELLED)
        assert_books_agree(engine)
        backend.most_batches = sys.maxsize
        assert answer_all(engine, [random_request(30, 1, max_tokens=6)])[0].tokens == alone[1]


def test_a_cancel_at_any_line_of_submit_is_heeded() -> None:
    lines: list[Place] = []
    engine = Engine(noisy())
    with at_each_line(lines.append):
        engine.submit(random_request(10))
    for moment in range(2, len(lines)):  # at the first two lines, the request does not exist yet
        backend = Counting()
        engine = Engine(backend)
        with at_each_line(only_once(moment, partial(cancel_for_good, engine, backend))):
            request_id = engine.submit(random_request(10))
        [gathered] = run_to_the_end(engine, [request_id])
        assert gathered.finished.reason is FinishReason.CANCELLED, lines[moment]


def test_a_prefill_is_cancelled_in_the_middle_of_a_pass() -> None:
    backend = ScriptedBackend(None, step_seconds=30)
    engine = Engine(backend)
    with by_thread(0.05, engine.cancel_current):
        [gathered] = answer_all(engine, [random_request(50)])
    assert gathered.finished.reason is FinishReason.CANCELLED
    assert (gathered.text, gathered.finished.timings.ttft_s) == ("", 0)
    backend._step_seconds = 0
    assert len(answer_all(engine, [random_request(50)])[0].tokens) == 20


def test_a_waiting_request_can_be_cancelled() -> None:
    engine = Engine(noisy())
    ids = [engine.submit(random_request(10, seed)) for seed in range(2)]
    engine.step()
    engine.cancel(ids[1])
    assert [event.request_id for event in engine.step() if isinstance(event, Finished)] == [ids[1]]


class LosingCache(ScriptedCache):
    """A cache that holds less than the engine believes, which is not an error here."""

    def truncate(self, seq: int, n: int) -> int:
        return super().truncate(seq, min(n, len(self.sequences[seq])))


class Losing(ScriptedBackend):
    """A backend like a recurrent model, which loses its earlier state when a pass stops half-way.

    Here, passes stop without a cancel.
    """

    def __init__(self, stopped_passes: tuple[int, ...]) -> None:
        super().__init__(None, context_size=128, max_sequences=3)
        self.kv = LosingCache(3, self.kv.capacity, None)
        self.stopped_passes = stopped_passes
        self.passes = 0

    def forward(self, batch: Batch) -> Outputs:
        self.passes += 1
        if self.passes in self.stopped_passes:
            for seq in set(batch.seq.tolist()):
                self.kv.free(seq)
            raise Cancelled("generation stopped")
        return super().forward(batch)


def test_what_a_stopped_pass_lost_is_run_again() -> None:
    """Covers prefill, decode, and other sequences in the batch."""
    requests = [random_request(60, seed) for seed in range(3)]
    answers = []
    for stopped_passes in [(), (1,), (2, 4), (9, 10, 15)]:
        backend = Losing(stopped_passes)
        engine = Engine(backend, rows_per_step=32)
        answers.append([gathered.tokens for gathered in answer_all(engine, requests)])
        assert backend.passes > max(stopped_passes, default=0)
        assert_books_agree(engine)
    assert answers == answers[:1] * 4
