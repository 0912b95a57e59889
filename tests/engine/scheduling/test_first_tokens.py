"""Tests of the predicted times to the first token, with an engine whose steps take the time of a model on a clock."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.run_speeds import LearntCosts
from llmrun.backends.scripted import FIRST_WORD, ScriptedBackend
from llmrun.base.types import Batch, Outputs
from llmrun.engine.costs import EMPTY, MOST_ROWS, StepCosts, StepSize
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request, TextDelta, TokenPrompt
from llmrun.engine.scheduling.scheduler import ChunkRule
from llmrun.engine.scheduling.waits import AnswerLengths, Load, Simulation
from tests.support.engine.scripted_models import endless, random_prompt

CONTEXT = 20_000
CODER = LearntCosts((0.03, 4.45e-3, 0.0, 1.13e-3), (0.026, 4.45e-3, 1e-3, 1.13e-3), 256, 256 * 8000, 3)


def coder_seconds(size: StepSize) -> float:
    """Return what a step of a 1.5B model takes on two cores. Small steps are less efficient."""
    attended = 1.1e-6 * (1.4 if 1 < size.rows <= 32 else 1.0)
    return 0.03 + 4.45e-3 * (size.rows - 1) + 1e-6 * size.cached + attended * size.attended


class ClockedBackend(ScriptedBackend):
    """A model whose steps take seconds on a clock of its own, with noise and a few disturbances."""

    def __init__(self, seconds: Callable[[StepSize], float], noise: float = 0.05) -> None:
        super().__init__(None, context_size=CONTEXT, max_sequences=4)
        self.now = 0.0
        self.last_s = 0.0  # the duration of the last step
        self.while_running: Callable[[], None] = lambda: None
        self._seconds, self._noise = seconds, noise
        self._random = random.Random(1)

    def forward(self, batch: Batch) -> Outputs:
        sequences, first, counts = np.unique(batch.seq, return_index=True, return_counts=True)
        depths = batch.pos[first]
        size = StepSize(len(sequences), len(batch.tokens), int(depths.sum()), int((depths * counts).sum()))
        factor = 1 + self._noise * self._random.gauss(0, 1) + (5 if self._random.random() < self._noise / 10 else 0)
        self.last_s = self._seconds(size) * max(factor, 0.5)
        self.while_running()
        self.now += self.last_s
        return super().forward(batch)

    def _logits(self, tokens: list[int]) -> Any:  # faster, because it does not hash the tokens
        return self._ids.astype(np.float32) * (len(tokens) % 7 - 3) / FIRST_WORD


@contextmanager
def clocked(monkeypatch: pytest.MonkeyPatch, backend: ClockedBackend) -> Iterator[Engine]:
    monkeypatch.setattr(time, "perf_counter", lambda: backend.now)
    with Engine(backend) as engine:
        yield engine


class Others:
    """Clients that send a request as soon as their last one has ended, until they are told to stop."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._random, self._ids = engine, random.Random(seed), set[int]()

    def step(self, n: int) -> tuple[set[int], set[int]]:
        """Run a step beside n other requests. Return the ids of requests with new tokens and of ended ones."""
        while len(self._ids) < n:
            prompt = random_prompt(self._random.randint(50, 2000), self._random.randint(0, 10**6))
            self._ids.add(self._engine.submit(endless(Request(prompt, self._random.randint(50, 400)))))
        events = self._engine.step()
        ended = {event.request_id for event in events if isinstance(event, Finished)}
        self._ids -= ended
        return {event.request_id for event in events if isinstance(event, TextDelta)}, ended

    def stop(self) -> None:
        for number in self._ids:
            self._engine.cancel(number)
        self._ids.clear()
        while not self._engine.idle:
            self._engine.step()


def run_prompt(
    engine: Engine, backend: ClockedBackend, others: Others, length: int, n_others: int
) -> tuple[float, float]:
    """Return the predicted and the real seconds until the first token of a prompt."""
    for _ in range(100 if n_others else 0):
        others.step(n_others)
    answer = engine.prepare(endless(Request(random_prompt(length, length), 2)))
    predicted, asked = engine.predicted(answer).first_token_s, backend.now
    number, real = engine.enqueue(answer), 0.0
    while not real:
        tokens, _ = others.step(n_others)
        real = backend.now - asked if number in tokens else 0.0
    others.stop()
    assert predicted is not None
    return predicted, real


# --- prompts on an idle engine and beside others ----------------------------------------------------------------------


@pytest.mark.push
@pytest.mark.parametrize("seed", [1, 2])
def test_first_tokens_come_when_predicted(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    backend, chance = ClockedBackend(coder_seconds), random.Random(seed)
    errors: dict[int, list[float]] = {0: [], 2: []}
    with clocked(monkeypatch, backend) as engine:
        engine._scheduler.costs.assume(CODER)
        others = Others(engine, seed)
        for index in range(10):
            length, n_others = int(np.exp(chance.uniform(np.log(500), np.log(8000)))), 2 * (index % 2)
            predicted, real = run_prompt(engine, backend, others, length, n_others)
            errors[n_others].append(abs(predicted / real - 1))
    assert statistics.median(errors[0]) < 0.1
    assert statistics.median(errors[2]) < 0.3
    assert statistics.median(errors[0] + errors[2]) < 0.2


@pytest.mark.push
def test_a_machine_that_became_slower_is_soon_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Today, each step takes three times as long as in the process that kept the costs."""
    backend = ClockedBackend(lambda size: 3 * coder_seconds(size))
    with clocked(monkeypatch, backend) as engine:
        engine._scheduler.costs.assume(CODER)
        others = Others(engine, 1)
        times = [run_prompt(engine, backend, others, length, 0) for length in (4000, 5000)]
    assert times[0][0] < 0.5 * times[0][1]
    assert times[1][0] == pytest.approx(times[1][1], rel=0.1)


def test_nothing_is_predicted_from_nothing() -> None:
    engine = Engine(ClockedBackend(coder_seconds))
    answer = engine.prepare(endless(Request(random_prompt(500), 2)))
    assert engine.predicted(answer).first_token_s is None
    engine.enqueue(answer)
    engine.step()
    assert engine.predicted(engine.prepare(endless(Request(random_prompt(500, 1), 2)))).first_token_s is not None
    engine.close()


@pytest.mark.parametrize("cached", [0, 100, 1500, 1999])
def test_cached_tokens_make_the_first_token_earlier(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    backend = ClockedBackend(coder_seconds, noise=0.0)
    with clocked(monkeypatch, backend) as engine:
        engine._scheduler.costs.assume(CODER)
        whole, others = random_prompt(2000), Others(engine, 1)
        if cached:
            engine.submit(endless(Request(TokenPrompt(whole.tokens[:cached]), 1)))
            others.stop()
        answer = engine.prepare(endless(Request(whole, 2)))
        predicted, asked = engine.predicted(answer).first_token_s, backend.now
        number = engine.enqueue(answer)
        while number not in others.step(0)[0]:
            pass
    assert predicted == pytest.approx(backend.now - asked, rel=0.1)


def test_followers_of_a_prefix_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request waits for the prefix that the first one computes, although neither of them runs yet."""
    backend = ClockedBackend(coder_seconds, noise=0.0)
    with clocked(monkeypatch, backend) as engine:
        engine._scheduler.costs.assume(CODER)
        prompt, times, numbers = random_prompt(3000), [], []
        for number in range(2):
            answer = engine.prepare(endless(Request(TokenPrompt([*prompt.tokens, number]), 2)))
            times.append(engine.predicted(answer))
            numbers.append(engine.enqueue(answer))
        others = Others(engine, 1)
        real: dict[int, float] = {}
        while len(real) < 2:
            for number in others.step(0)[0]:
                real.setdefault(number, backend.now)
    assert [time.first_token_s for time in times] == pytest.approx([real[number] for number in numbers], rel=0.1)
    assert times[1].wait_s > 0.9 * real[numbers[0]]


def test_a_running_step_is_part_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ClockedBackend(coder_seconds, noise=0.0)
    waits: list[float] = []
    with clocked(monkeypatch, backend) as engine:
        engine._scheduler.costs.assume(CODER)
        new = engine.prepare(endless(Request(random_prompt(50, 1), 2)))
        backend.while_running = lambda: waits.append(engine.predicted(new).wait_s)
        engine.submit(endless(Request(random_prompt(256), 2)))
        engine.step()
    assert waits == [pytest.approx(backend.last_s, rel=0.1)]


# --- the rest of a running prompt -------------------------------------------------------------------------------------


def test_the_rest_of_a_prompt_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ClockedBackend(coder_seconds)
    left: list[tuple[float, float | None]] = []
    with clocked(monkeypatch, backend) as engine:
        others = Others(engine, 1)

        def look() -> None:
            left.append((backend.now, engine.prefill_progress()[0].left_s))

        backend.while_running = look
        number = engine.submit(endless(Request(random_prompt(6000), 1)))
        while number not in others.step(0)[0]:
            pass
    assert left[0][1] is None  # nothing is known yet
    for now, seconds in left[len(left) // 2 :]:
        assert seconds is not None
        assert seconds == pytest.approx(backend.now - now, rel=0.25, abs=1.0)


# --- costs from another process ---------------------------------------------------------------------------------------


def test_learnt_costs_predict_the_same_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ClockedBackend(coder_seconds)
    with clocked(monkeypatch, backend) as engine:
        others = Others(engine, 1)
        engine.submit(endless(Request(random_prompt(9000), 1)))
        while not engine.idle:
            others.step(0)
        costs = engine._scheduler.costs
        later = StepCosts()
        later.assume(costs.learnt())
    for rows, depth in ((256, 0), (256, 8000), (64, 4000)):
        size = EMPTY.with_chunk(rows, depth)
        assert later.of_step(size, rows) == pytest.approx(costs.of_step(size, rows), rel=0.1)
    assert later.rows_within(1.0, StepSize(1, 1, 10, 10), 0) > 32  # larger steps than in a new process


def test_observed_costs_are_not_replaced() -> None:
    costs = StepCosts()
    costs.observe(EMPTY.with_chunk(256, 0), 256, 1.0)
    costs.assume(replace(CODER, prompts=(9.0, 9.0, 9.0, 9.0)))
    assert costs.of_step(EMPTY.with_chunk(256, 0), 256) == pytest.approx(1.0)
    assert costs.known  # the costs of answers were unknown


@given(st.integers(1, 19_000), st.integers(0, 18_999), st.integers(1, 1000), st.integers(0, 4))
def test_longer_and_less_cached_prompts_are_not_earlier(tokens: int, cached: int, more: int, answers: int) -> None:
    costs = StepCosts()
    costs.assume(CODER)
    rule = ChunkRule(costs, MOST_ROWS, by_seconds=True)

    def first_token(missing: int, depth: int, n: int) -> float:
        others = [Load(0, 100, 0, 100_000, 10)] * n
        new = Load(missing, depth, 0, 100, 10)
        simulation = Simulation(
            others, [new], free_slots=9, free_blocks=9999, rule=rule, lengths=AnswerLengths(), tokens_per_step=1.0
        )
        simulation.run([n])
        return simulation.first_tokens[n]

    cached = min(cached, tokens - 1)
    all_computed, some_cached = first_token(tokens, 0, answers), first_token(tokens - cached, cached, answers)
    assert some_cached <= 1.02 * all_computed + 0.02  # a step of one row counts as a step of an answer
    assert all_computed <= 1.02 * first_token(tokens + more, 0, answers) + 0.02
