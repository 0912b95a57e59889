"""Tests of the predicted durations of steps with prompts."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from llmrun.engine.drafting.costs import StepSize
from llmrun.engine.scheduling.predicting import EMPTY, LEAST_ROWS, MOST_ROWS, StepPredictor, with_chunk
from tests.support.engine.simulated_server import MACHINES

Duration = Callable[[StepSize], float]


def answers(n: int, depth: int) -> StepSize:
    return StepSize(n, n, n * depth, n * depth)


def budget_of(seconds: Duration) -> float:
    return 5 * seconds(answers(4, 1000))


def learn(
    predictor: StepPredictor, seconds: Duration, steps: int = 300, *, seed: int = 1, disturbed: float = 0.0
) -> None:
    """Run prompts of random depths beside answers, with 5 % of noise, and other programs that disturb some steps."""
    chance = random.Random(seed)
    size, depth, missing = answers(1, 100), 0, 0
    for _ in range(steps):
        if chance.random() < 0.1:
            size = answers(chance.choice([0, 1, 2, 4, 8]), chance.randint(10, 4000))
        if missing <= 0:
            depth, missing = chance.choice([0, 0, 0, 1000, 16000]), chance.randint(20, 3000)
        step, rows = size, 0
        if chance.random() < 0.7 or not size.answers:
            budget = budget_of(seconds) if size.answers else math.inf
            rows = min(predictor.rows_within(budget, size, depth), missing)
            step = with_chunk(size, rows, depth)
            depth, missing = depth + rows, missing - rows
        noise = chance.gauss(1.0, 0.05) * (10 if chance.random() < disturbed else 1)
        predictor.observe(step, rows, seconds(step) * noise)


def shares_of_budget(predictor: StepPredictor, seconds: Duration) -> list[float]:
    """Return the true seconds over the budget for steps of many kinds whose rows the budget limits."""
    budget = budget_of(seconds)
    shares = []
    for size in [answers(1, 100), answers(2, 3000), answers(4, 1000), answers(8, 500)]:
        for depth in [0, 500, 2000, 8000, 16000]:
            rows = predictor.rows_within(budget, size, depth)
            if LEAST_ROWS < rows < MOST_ROWS:
                shares.append(seconds(with_chunk(size, rows, depth)) / budget)
            else:
                assert rows == LEAST_ROWS or seconds(with_chunk(size, rows, depth)) <= 1.2 * budget
    return shares


@pytest.mark.parametrize("disturbed", [0.0, 0.03], ids=["quiet", "disturbed"])
@pytest.mark.parametrize("name", MACHINES)
def test_steps_with_prompts_take_about_the_budget(name: str, disturbed: float) -> None:
    predictor = StepPredictor()
    learn(predictor, MACHINES[name], disturbed=disturbed)
    shares = shares_of_budget(predictor, MACHINES[name])
    assert len(shares) >= 10
    assert max(shares) < 1.2
    assert min(shares) > 0.6
    assert 0.8 < statistics.median(shares) < 1.1


@pytest.mark.parametrize("name", MACHINES)
def test_deep_prompts_tell_something_about_shallow_ones(name: str) -> None:
    """A fit without assumptions could say that all of the time is attention, so that 256 shallow rows take no time."""
    predictor, seconds, size = StepPredictor(), MACHINES[name], answers(2, 500)
    for depth in range(16000, 20000, 40):
        rows = predictor.rows_within(budget_of(seconds), size, depth)
        predictor.observe(with_chunk(size, rows, depth), rows, seconds(with_chunk(size, rows, depth)))
    rows = predictor.rows_within(budget_of(seconds), size, 0)
    assert 0.5 < seconds(with_chunk(size, rows, 0)) / budget_of(seconds) < 1.5


def test_deep_rows_cost_more() -> None:
    predictor = StepPredictor()
    seconds = MACHINES["135M, one thread"]
    learn(predictor, seconds)
    rows = [predictor.rows_within(0.1, answers(4, 100), depth) for depth in (0, 4000, 16000)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 1.5 * rows[-1]


def test_the_first_rows_beside_answers_are_few() -> None:
    predictor = StepPredictor()
    assert predictor.rows_within(10.0, answers(4, 100), 0) == 32
    for _ in range(20):
        predictor.observe(answers(4, 100), 0, 0.02)
    assert predictor.rows_within(10.0, answers(4, 100), 0) == 32
    assert predictor.rows_within(10.0, answers(4, 100), 8000) == LEAST_ROWS


def test_the_number_of_rows_doubles_until_it_is_known() -> None:
    predictor, seconds = StepPredictor(), MACHINES["135M, one thread"]
    found = []
    for _ in range(5):
        found.append(predictor.rows_within(10.0, answers(4, 100), 0))
        step = with_chunk(answers(4, 100), found[-1], 0)
        predictor.observe(step, found[-1], seconds(step))
    assert found == [32, 64, 128, 256, 256]


def test_a_prompt_without_company_gets_all_rows() -> None:
    assert StepPredictor().rows_within(math.inf, EMPTY, 0) == MOST_ROWS


def test_every_step_with_prompts_has_a_few_rows() -> None:
    predictor = StepPredictor()
    learn(predictor, MACHINES["8B, 8 threads"])
    assert predictor.rows_within(1e-6, answers(8, 4000), 16000) == LEAST_ROWS
    assert predictor.rows_within(1e-6, answers(8, 4000), 16000, least=0) == 0


def test_two_prompts_share_one_budget() -> None:
    predictor, seconds = StepPredictor(), MACHINES["135M, one thread"]
    learn(predictor, seconds)
    budget = budget_of(seconds)
    one = with_chunk(answers(4, 1000), 10, 0)
    both = with_chunk(one, predictor.rows_within(budget, one, 500, least=0), 500)
    assert seconds(both) <= 1.2 * budget
    assert predictor.rows_within(budget, both, 500, least=0) <= 3


def test_one_disturbed_step_changes_little() -> None:
    predictor, seconds = StepPredictor(), MACHINES["135M, one thread"]
    learn(predictor, seconds)
    budget, size = budget_of(seconds), answers(4, 1000)
    before = predictor.rows_within(budget, size, 500)
    step = with_chunk(size, before, 500)
    predictor.observe(step, before, 100 * seconds(step))
    assert predictor.rows_within(budget, size, 500) > 0.7 * before


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_another_speed_of_the_machine_is_learnt(factor: float) -> None:
    """For example, because the laptop is now on battery power."""
    predictor, seconds = StepPredictor(), MACHINES["135M, one thread"]
    learn(predictor, seconds)
    learn(predictor, lambda size: factor * seconds(size), 100, seed=2)
    shares = shares_of_budget(predictor, lambda size: factor * seconds(size))
    assert 0.8 < statistics.median(shares) < 1.2


def test_predictions_stay_positive() -> None:
    """On this machine, rows get dearer in large steps, so that the line with the smallest error begins below zero."""
    predictor, chance = StepPredictor(), random.Random(3)
    for _ in range(300):
        size, rows = answers(chance.choice([16, 32, 64]), 100), chance.choice([0, 30, 256])
        size = with_chunk(size, rows, 0) if rows else size
        predictor.observe(size, rows, 1e-5 * size.rows**2)
        for small in (EMPTY, answers(1, 1), answers(2, 0)):
            assert predictor.of_step(small, 0) > 0
            assert predictor.of_step(small, 1) > 0


def test_steps_that_take_no_time_are_harmless() -> None:
    """A coarse clock measures 0 for the steps of a stand-in."""
    predictor = StepPredictor()
    for seconds in [0.0] * 50 + [0.1] * 200:
        predictor.observe(with_chunk(EMPTY, 30, 0), 30, seconds)
    assert predictor.of_step(with_chunk(EMPTY, 30, 0), 30) == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("name", MACHINES)
def test_the_seconds_of_a_prompt_token_are_learnt(name: str) -> None:
    predictor = StepPredictor()
    learn(predictor, MACHINES[name])
    expected = MACHINES[name](with_chunk(EMPTY, MOST_ROWS, 0)) / MOST_ROWS
    assert predictor.row_seconds == pytest.approx(expected, rel=0.2)
