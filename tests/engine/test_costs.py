"""Tests of the predicted durations of steps, with prompts and with drafts."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from llmrun.engine.costs import EMPTY, LEAST_ROWS, MOST_ROWS, StepCosts, StepSize
from tests.support.engine.simulated_server import MACHINES
from tests.support.engine.simulated_steps import size_with_draft

Duration = Callable[[StepSize], float]


def answers(n: int, depth: int) -> StepSize:
    return StepSize(n, n, n * depth, n * depth)


def budget_of(seconds: Duration) -> float:
    return 5 * seconds(answers(4, 1000))


def learn(costs: StepCosts, seconds: Duration, steps: int = 300, *, seed: int = 1, disturbed: float = 0.0) -> None:
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
            rows = min(costs.rows_within(budget, size, depth), missing)
            step = size.with_chunk(rows, depth)
            depth, missing = depth + rows, missing - rows
        noise = chance.gauss(1.0, 0.05) * (10 if chance.random() < disturbed else 1)
        costs.observe(step, rows, seconds(step) * noise)


def shares_of_budget(costs: StepCosts, seconds: Duration) -> list[float]:
    """Return the true seconds over the budget for steps of many kinds whose rows the budget limits."""
    budget = budget_of(seconds)
    shares = []
    for size in [answers(1, 100), answers(2, 3000), answers(4, 1000), answers(8, 500)]:
        for depth in [0, 500, 2000, 8000, 16000]:
            rows = costs.rows_within(budget, size, depth)
            if LEAST_ROWS < rows < MOST_ROWS:
                shares.append(seconds(size.with_chunk(rows, depth)) / budget)
            else:
                assert rows == LEAST_ROWS or seconds(size.with_chunk(rows, depth)) <= 1.2 * budget
    return shares


@pytest.mark.parametrize("disturbed", [0.0, 0.03], ids=["quiet", "disturbed"])
@pytest.mark.parametrize("name", MACHINES)
def test_steps_with_prompts_take_about_the_budget(name: str, disturbed: float) -> None:
    costs = StepCosts()
    learn(costs, MACHINES[name], disturbed=disturbed)
    shares = shares_of_budget(costs, MACHINES[name])
    assert len(shares) >= 10
    assert max(shares) < 1.2
    assert min(shares) > 0.6
    assert 0.8 < statistics.median(shares) < 1.1


@pytest.mark.parametrize("name", MACHINES)
def test_deep_prompts_tell_something_about_shallow_ones(name: str) -> None:
    """A fit without assumptions could say that all of the time is attention, so that 256 shallow rows take no time."""
    costs, seconds, size = StepCosts(), MACHINES[name], answers(2, 500)
    for depth in range(16000, 20000, 40):
        rows = costs.rows_within(budget_of(seconds), size, depth)
        costs.observe(size.with_chunk(rows, depth), rows, seconds(size.with_chunk(rows, depth)))
    rows = costs.rows_within(budget_of(seconds), size, 0)
    assert 0.5 < seconds(size.with_chunk(rows, 0)) / budget_of(seconds) < 1.5


def test_deep_rows_cost_more() -> None:
    costs = StepCosts()
    seconds = MACHINES["135M, one thread"]
    learn(costs, seconds)
    rows = [costs.rows_within(0.1, answers(4, 100), depth) for depth in (0, 4000, 16000)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 1.5 * rows[-1]


def test_the_first_rows_beside_answers_are_few() -> None:
    costs = StepCosts()
    assert costs.rows_within(10.0, answers(4, 100), 0) == 32
    for _ in range(20):
        costs.observe(answers(4, 100), 0, 0.02)
    assert costs.rows_within(10.0, answers(4, 100), 0) == 32
    assert costs.rows_within(10.0, answers(4, 100), 8000) == LEAST_ROWS


def test_the_number_of_rows_doubles_until_it_is_known() -> None:
    costs, seconds = StepCosts(), MACHINES["135M, one thread"]
    found = []
    for _ in range(5):
        found.append(costs.rows_within(10.0, answers(4, 100), 0))
        step = answers(4, 100).with_chunk(found[-1], 0)
        costs.observe(step, found[-1], seconds(step))
    assert found == [32, 64, 128, 256, 256]


def test_new_depths_need_no_care_without_answers() -> None:
    costs, seconds = StepCosts(), MACHINES["135M, one thread"]
    for _ in range(20):
        step = EMPTY.with_chunk(256, 0)
        costs.observe(step, 256, seconds(step))
    assert costs.rows_within(2.0, answers(1, 100), 30_000, 1) < 10
    assert costs.rows_alone(2.0, EMPTY, 30_000, 1) >= 48


@pytest.mark.parametrize("row", [0.02, 0.06, 0.2, 1.0])
def test_slow_rows_run_together_but_not_for_long(row: float) -> None:
    """Reading the weights takes 0.1 s. If 2 s are too short for 48 rows, up to 48 rows may take 4 s."""
    costs = StepCosts()
    for rows in [1, 8, 64, 256] * 20:
        costs.observe(EMPTY.with_chunk(rows, 0), rows, 0.1 + row * rows)
    rows = costs.rows_alone(2.0, EMPTY, 0, 1)
    assert rows == {0.02: 95, 0.06: 48, 0.2: 19, 1.0: 3}[row]
    assert costs.rows_alone(2.0, EMPTY.with_chunk(100, 0), 0, 0) == 0


def test_every_step_with_prompts_has_a_few_rows() -> None:
    costs = StepCosts()
    learn(costs, MACHINES["8B, 8 threads"])
    assert costs.rows_within(1e-6, answers(8, 4000), 16000) == LEAST_ROWS
    assert costs.rows_within(1e-6, answers(8, 4000), 16000, least=0) == 0


def test_two_prompts_share_one_budget() -> None:
    costs, seconds = StepCosts(), MACHINES["135M, one thread"]
    learn(costs, seconds)
    budget = budget_of(seconds)
    one = answers(4, 1000).with_chunk(10, 0)
    both = one.with_chunk(costs.rows_within(budget, one, 500, least=0), 500)
    assert seconds(both) <= 1.2 * budget
    assert costs.rows_within(budget, both, 500, least=0) <= 3


def test_one_disturbed_step_with_a_prompt_changes_little() -> None:
    costs, seconds = StepCosts(), MACHINES["135M, one thread"]
    learn(costs, seconds)
    budget, size = budget_of(seconds), answers(4, 1000)
    before = costs.rows_within(budget, size, 500)
    step = size.with_chunk(before, 500)
    costs.observe(step, before, 100 * seconds(step))
    assert costs.rows_within(budget, size, 500) > 0.7 * before


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_another_speed_of_the_machine_is_learnt(factor: float) -> None:
    """For example, because the laptop is now on battery power."""
    costs, seconds = StepCosts(), MACHINES["135M, one thread"]
    learn(costs, seconds)
    learn(costs, lambda size: factor * seconds(size), 100, seed=2)
    shares = shares_of_budget(costs, lambda size: factor * seconds(size))
    assert 0.8 < statistics.median(shares) < 1.2


def test_predictions_stay_positive() -> None:
    """On this machine, rows get dearer in large steps, so that the line with the smallest error begins below zero."""
    costs, chance = StepCosts(), random.Random(3)
    for _ in range(300):
        size, rows = answers(chance.choice([16, 32, 64]), 100), chance.choice([0, 30, 256])
        size = size.with_chunk(rows, 0) if rows else size
        costs.observe(size, rows, 1e-5 * size.rows**2)
        for small in (EMPTY, answers(1, 1), answers(2, 0)):
            assert costs.of_step(small, 0) > 0
            assert costs.of_step(small, 1) > 0


def test_steps_that_take_no_time_are_harmless() -> None:
    """A coarse clock measures 0 for the steps of a stand-in."""
    costs = StepCosts()
    for seconds in [0.0] * 50 + [0.1] * 200:
        costs.observe(EMPTY.with_chunk(30, 0), 30, seconds)
    assert costs.of_step(EMPTY.with_chunk(30, 0), 30) == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("name", MACHINES)
def test_the_seconds_of_a_prompt_token_are_learnt(name: str) -> None:
    costs = StepCosts()
    learn(costs, MACHINES[name])
    expected = MACHINES[name](EMPTY.with_chunk(MOST_ROWS, 0)) / MOST_ROWS
    assert costs.row_seconds == pytest.approx(expected, rel=0.2)


def small_step_seconds(size: StepSize) -> float:
    return 20e-3 + 2e-3 * size.rows + 3e-6 * size.cached + 1e-6 * size.attended


def observed(sizes: list[StepSize]) -> StepCosts:
    costs = StepCosts()
    for size in sizes:
        costs.observe(size, 0, small_step_seconds(size))
    return costs


def size_of(rows: int, depth: int) -> StepSize:
    return StepSize(1, rows, depth, rows * depth)


def test_nothing_is_known_before_the_first_step() -> None:
    costs = StepCosts()
    assert not costs.known
    costs.observe(size_of(1, 10), 0, 0.02)
    assert costs.known


def test_the_first_prompt_is_assumed_to_take_longer_than_a_token() -> None:
    """Otherwise, the progress line would show the prompt as complete at once."""
    assert StepCosts().of_step(size_of(MOST_ROWS, 0), MOST_ROWS) > 5 * StepCosts().of_step(size_of(1, 0))


def test_all_four_costs_are_found() -> None:
    chance = random.Random(1)
    costs = observed([size_of(chance.randint(1, 16), chance.randint(0, 8000)) for _ in range(300)])
    for rows, depth in [(1, 100), (4, 4000), (16, 8000)]:
        assert costs.of_step(size_of(rows, depth)) == pytest.approx(small_step_seconds(size_of(rows, depth)), rel=0.03)
    assert costs.of_row(size_of(1, 5000), 5000) == pytest.approx(7e-3, rel=0.1)


def test_a_row_is_assumed_until_it_is_measured() -> None:
    costs = observed([size_of(1, 100 + i) for i in range(200)])
    step = costs.of_step(size_of(1, 300))
    assert step == pytest.approx(small_step_seconds(size_of(1, 300)), rel=0.02)
    assert 0.05 * step < costs.of_row(size_of(1, 300), 300) < 0.2 * step


def test_steps_without_drafts_keep_the_rows_cost() -> None:
    costs = observed([size_of(1 + i % 8, 100) for i in range(80)])
    before = costs.of_row(size_of(1, 100), 100)
    for i in range(500):
        costs.observe(size_of(1, 180 + i), 0, small_step_seconds(size_of(1, 180 + i)))
    assert costs.of_row(size_of(1, 100), 100) == pytest.approx(before, rel=0.25)


def test_one_disturbed_step_changes_little() -> None:
    costs = observed([size_of(1 + i % 8, 100) for i in range(80)])
    before = costs.of_row(size_of(1, 100), 100)
    costs.observe(size_of(8, 100), 0, 100 * small_step_seconds(size_of(8, 100)))
    assert costs.of_row(size_of(1, 100), 100) == pytest.approx(before, rel=0.5)
    assert costs.of_step(size_of(1, 100)) == pytest.approx(small_step_seconds(size_of(1, 100)), rel=0.25)


def test_a_row_always_costs_something() -> None:
    costs = StepCosts()
    for i in range(50):
        costs.observe(size_of(1 + i % 8, 100), 0, 0.02 - 1e-3 * (i % 8))
    assert costs.of_row(size_of(1, 100), 100) > 0


def test_rows_of_several_answers_share_the_weights() -> None:
    chance = random.Random(2)
    costs = StepCosts()
    for _ in range(200):
        answers, depth, drafted = chance.randint(1, 8), chance.randint(0, 4000), chance.randint(0, 15)
        size = size_with_draft(StepSize(answers, answers, answers * depth, answers * depth), drafted, depth)
        costs.observe(size, 0, small_step_seconds(size))
    size = StepSize(8, 8, 8 * 1000, 8 * 1000)
    assert costs.of_step(size) == pytest.approx(small_step_seconds(size), rel=0.03)


def test_longer_drafts_are_estimated_step_by_step() -> None:
    costs = StepCosts()
    limits = []
    for rows in (1, 4, 7, 13):
        costs.observe(size_of(rows, 100), 0, 1.0)
        limits.append(costs.most_drafted)
    assert limits == [3, 6, 12, 24]
