"""Tests of the speeds that follow from the steps of a sample."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from llmrun.jobs.batching.estimate.sampling import Step, speeds_of

BASE_S, EACH_S, ROW_S = 0.010, 0.001, 0.002


def step(prompt_rows: int, answering: int) -> Step:
    seconds = (BASE_S + EACH_S * answering if answering else 0) + ROW_S * prompt_rows
    return Step(seconds, prompt_rows, answering, answering)


def sample(n: int) -> Iterator[Step]:
    """Yield steps with 16 answers, some of which also compute a prompt, and then steps with fewer answers."""
    chance = random.Random(4)
    for _ in range(n):
        yield step(chance.choice([0, 0, 0, 30]), 16)
    for answering in range(16, 0, -1):
        yield step(0, answering)


def test_the_costs_of_a_machine_are_found() -> None:
    found = speeds_of([*sample(400)], slice(0, 400))
    assert found.prompt_s == pytest.approx(ROW_S)
    assert found.generated_s == pytest.approx((BASE_S + 16 * EACH_S) / 16)
    assert found.step_s == pytest.approx(BASE_S)
    assert found.tokens_per_step == 1
    assert found.drift == pytest.approx((1, 1, 1))


def test_the_sample_itself_is_predicted() -> None:
    steps = [*sample(300)]
    found = speeds_of(steps, slice(0, 300))
    rows, generated = sum(one.prompt_rows for one in steps[:300]), sum(one.generated for one in steps[:300])
    assert found.seconds(rows, generated) == pytest.approx(sum(one.seconds for one in steps[:300]))


def test_speeds_without_steps_for_answers_alone() -> None:
    """For example, if every answer has one token."""
    found = speeds_of([Step(0.2, 100, 0, 1) for _ in range(10)], slice(0, 10))
    assert found.prompt_s == pytest.approx(0.002)
    assert found.seconds(1000, 10) == pytest.approx(2.0)


def test_a_steady_part_without_answers_is_not_used() -> None:
    steps = [step(30, 0), *(step(0, 2) for _ in range(5))]
    assert speeds_of(steps, slice(0, 0)).generated_s == pytest.approx((BASE_S + 2 * EACH_S) / 2)


def test_drafts_give_several_tokens_in_a_step() -> None:
    assert speeds_of([Step(0.1, 0, 4, 10) for _ in range(5)], slice(0, 5)).tokens_per_step == 2.5


def test_changing_speeds_widen_the_interval() -> None:
    chance = random.Random(5)
    steps = [Step(0.02 * chance.uniform(0.5, 1.5), 0, 16, 16) for _ in range(40)]
    drift = speeds_of(steps, slice(0, 40)).drift
    assert 0.5 < drift.low < 0.99
    assert 1.01 < drift.high < 1.5


def test_the_interval_stays_between_the_slowest_and_the_fastest_part() -> None:
    steps = [Step(0.01 if number < 20 else 0.02, 0, 16, 16) for number in range(40)]
    drift = speeds_of(steps, slice(0, 40)).drift
    assert drift.low >= 0.01 / 0.015 - 1e-9
    assert drift.high <= 0.02 / 0.015 + 1e-9


def test_no_steps_are_an_error() -> None:
    with pytest.raises(ValueError, match="no steps"):
        speeds_of([], slice(0, 0))
