"""Tests of the division of steps among answers and prompts.

The scripted backend records every batch. Its steps take no time, so the predictor is told what they would take.
"""

from __future__ import annotations

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.engine.costs import StepCosts, StepSize
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TextDelta
from tests.support.engine.scripted_models import endless, random_prompt

BASE, ROW, ATTENDED = 0.01, 0.001, 1e-7  # seconds of a step, of each row, and of each row for each token before it


def seconds_of(size: StepSize) -> float:
    return BASE + ROW * size.rows + ATTENDED * size.attended


class Told(StepCosts):
    """A predictor that knows what steps take, and records the sizes of those that were run."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[StepSize, int]] = []
        for rows, depth in [(1, 0), (256, 0), (256, 30_000), (64, 10_000), (8, 30_000), (128, 2_000)] * 30:
            size = StepSize(1, rows, depth, rows * depth)
            super().observe(size, rows, seconds_of(size))
        for answers in [1, 4, 8] * 10:
            size = StepSize(answers, answers, 100 * answers, 100 * answers)
            super().observe(size, 0, seconds_of(size))

    def observe(self, size: StepSize, prompt_rows: int, seconds: float) -> None:
        self.steps.append((size, prompt_rows))


def told_engine(max_sequences: int) -> tuple[Engine, Told]:
    engine = Engine(ScriptedBackend(None, max_sequences=max_sequences, context_size=40_000))
    engine._scheduler.costs = told = Told()
    return engine, told


def steps_to_first_token(engine: Engine, request_id: int) -> int:
    for step in range(1, 100):
        if any(isinstance(event, TextDelta) and event.request_id == request_id for event in engine.step()):
            return step
    pytest.fail("no token")


@pytest.mark.parametrize("answers", [0, 3])
def test_a_short_prompt_overtakes_one_of_32k(answers: int) -> None:
    engine, _ = told_engine(max_sequences=8)
    for seed in range(answers):
        engine.submit(endless(Request(random_prompt(10, seed), 1000)))
    engine.step()
    engine.submit(endless(Request(random_prompt(32_000, 50), 10)))
    for _ in range(20):
        engine.step()
    assert steps_to_first_token(engine, engine.submit(endless(Request(random_prompt(24, 60), 10)))) <= 3


@pytest.mark.push
@pytest.mark.parametrize("prompts", [1, 4])
def test_prompts_take_the_time_that_answers_can_wait(prompts: int) -> None:
    engine, told = told_engine(max_sequences=3 + prompts)
    for seed in range(3):
        engine.submit(endless(Request(random_prompt(10, seed), 1000)))
    engine.step()
    told.steps.clear()
    for seed in range(prompts):
        engine.submit(endless(Request(random_prompt(20_000 // prompts, 9 + seed), 10)))
    while (engine.status().running and any(answer.in_prefill for answer in engine._requests.running)) or not told.steps:
        engine.step()
    taken = [seconds_of(size) for size, prompt_rows in told.steps if prompt_rows]
    assert 0.08 < sum(taken) / len(taken) < 0.11
    assert max(taken) < 0.13
    assert all(size.answers >= 3 for size, _ in told.steps)  # no answer ever skips a step


@pytest.mark.push
@pytest.mark.parametrize(("prompts", "most_seconds"), [(1, 2.05), (2, 1.05)])
def test_a_deep_prompt_leaves_gaps_for_short_ones(prompts: int, most_seconds: float) -> None:
    """A step without answers takes at most 2 s, or 1 s if there is another prompt."""
    engine = Engine(ScriptedBackend(None, max_sequences=2, context_size=400_000))
    engine._scheduler.costs = told = Told()
    for seed in range(prompts):
        engine.submit(endless(Request(random_prompt(300_000 // prompts, seed), 2)))
    while engine.status().running == prompts or not told.steps:
        engine.step()
    assert max(seconds_of(size) for size, _ in told.steps) < most_seconds
    assert [size.rows for size, _ in told.steps[:5]] == [256] * 5


class Laptop(StepCosts):
    """A predictor that learns what steps of a 1.5B model would take on two cores.

    attended  seconds that a row takes for each token before the row; in steps of 2 to 32 rows, 1.4 times as long
    """

    def __init__(self, attended: float) -> None:
        super().__init__()
        self._attended = attended
        self.steps: list[tuple[StepSize, float]] = []

    def seconds(self, size: StepSize) -> float:
        attended = self._attended * (1.4 if 1 < size.rows <= 32 else 1.0)
        return 0.03 + 4.45e-3 * (size.rows - 1) + 5e-7 * size.cached + attended * size.attended

    def observe(self, size: StepSize, prompt_rows: int, seconds: float) -> None:
        self.steps.append((size, self.seconds(size)))
        super().observe(size, prompt_rows, self.seconds(size))


@pytest.mark.push
@pytest.mark.parametrize("attended", [0.4e-6, 1.1e-6])
def test_deep_prompts_have_large_steps(attended: float) -> None:
    """With fewer rows, each row would take longer. At a depth of 32,000 tokens, 48 rows take 0.9 or 1.9 s."""
    engine = Engine(ScriptedBackend(None, context_size=40_000))
    engine._scheduler.costs = laptop = Laptop(attended)
    engine.submit(endless(Request(random_prompt(32_000), 20)))
    while not engine.idle:
        engine.step()
    prompts = [(size, seconds) for size, seconds in laptop.steps if size.cached < 31_900]
    assert min(size.rows for size, _ in prompts) >= 48
    assert max(seconds for _, seconds in prompts) < 2.3


@pytest.mark.push
def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    engine, _ = told_engine(max_sequences=4)
    long = engine.submit(endless(Request(random_prompt(2_000, 99), 5)))
    started = False
    for seed in range(400):
        if engine.status().running < 4:
            engine.submit(endless(Request(random_prompt(200, seed), 2)))
        started = started or any(event.request_id == long for event in engine.step() if isinstance(event, TextDelta))
    assert started


def test_results_that_depend_on_the_batch_are_not_scheduled_by_time() -> None:
    class Dependent(ScriptedBackend):
        def __init__(self) -> None:
            super().__init__(None, max_sequences=2, context_size=4096)
            object.__setattr__(self.info, "batch_invariant", False)

    backend = Dependent()
    engine = Engine(backend)
    engine._scheduler.costs = Told()
    engine.submit(endless(Request(random_prompt(10), 1000)))
    engine.step()
    engine.submit(endless(Request(random_prompt(1000, 1), 1)))
    engine.step()
    assert len(backend.batches[-1].tokens) == 256
