"""Tests of the fitted durations of steps."""

from __future__ import annotations

import random

import pytest

from llmrun.engine.drafting.costs import StepCosts, StepSize
from tests.support.engine.simulated_steps import size_with_draft


def seconds(size: StepSize) -> float:
    return 20e-3 + 2e-3 * size.rows + 3e-6 * size.cached + 1e-6 * size.attended


def observed(sizes: list[StepSize]) -> StepCosts:
    costs = StepCosts()
    for size in sizes:
        costs.observe(size, seconds(size))
    return costs


def size_of(rows: int, depth: int) -> StepSize:
    return StepSize(1, rows, depth, rows * depth)


def test_nothing_is_known_before_the_first_step() -> None:
    costs = StepCosts()
    assert not costs.known
    costs.observe(size_of(1, 10), 0.02)
    assert costs.known


def test_all_four_costs_are_found() -> None:
    chance = random.Random(1)
    costs = observed([size_of(chance.randint(1, 16), chance.randint(0, 8000)) for _ in range(300)])
    for rows, depth in [(1, 100), (4, 4000), (16, 8000)]:
        assert costs.of_step(size_of(rows, depth)) == pytest.approx(seconds(size_of(rows, depth)), rel=0.03)
    assert costs.of_row(size_of(1, 5000), 5000) == pytest.approx(7e-3, rel=0.1)


def test_a_row_is_assumed_until_it_is_measured() -> None:
    costs = observed([size_of(1, 100 + i) for i in range(200)])
    step = costs.of_step(size_of(1, 300))
    assert step == pytest.approx(seconds(size_of(1, 300)), rel=0.02)
    assert 0.05 * step < costs.of_row(size_of(1, 300), 300) < 0.2 * step


def test_steps_without_drafts_keep_the_rows_cost() -> None:
    costs = observed([size_of(1 + i % 8, 100) for i in range(80)])
    before = costs.of_row(size_of(1, 100), 100)
    for i in range(500):
        costs.observe(size_of(1, 180 + i), seconds(size_of(1, 180 + i)))
    assert costs.of_row(size_of(1, 100), 100) == pytest.approx(before, rel=0.25)


def test_one_disturbed_step_changes_little() -> None:
    costs = observed([size_of(1 + i % 8, 100) for i in range(80)])
    before = costs.of_row(size_of(1, 100), 100)
    costs.observe(size_of(8, 100), 100 * seconds(size_of(8, 100)))
    assert costs.of_row(size_of(1, 100), 100) == pytest.approx(before, rel=0.5)
    assert costs.of_step(size_of(1, 100)) == pytest.approx(seconds(size_of(1, 100)), rel=0.25)


def test_a_row_always_costs_something() -> None:
    costs = StepCosts()
    for i in range(50):
        costs.observe(size_of(1 + i % 8, 100), 0.02 - 1e-3 * (i % 8))
    assert costs.of_row(size_of(1, 100), 100) > 0


def test_rows_of_several_answers_share_the_weights() -> None:
    chance = random.Random(2)
    costs = StepCosts()
    for _ in range(200):
        answers, depth, drafted = chance.randint(1, 8), chance.randint(0, 4000), chance.randint(0, 15)
        size = size_with_draft(StepSize(answers, answers, answers * depth, answers * depth), drafted, depth)
        costs.observe(size, seconds(size))
    size = StepSize(8, 8, 8 * 1000, 8 * 1000)
    assert costs.of_step(size) == pytest.approx(seconds(size), rel=0.03)


def test_longer_drafts_are_estimated_step_by_step() -> None:
    costs = StepCosts()
    limits = []
    for rows in (1, 4, 7, 13):
        costs.observe(size_of(rows, 100), 1.0)
        limits.append(costs.most_drafted)
    assert limits == [3, 6, 12, 24]
