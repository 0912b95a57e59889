"""Tests of the pauses before restarts, and of noticing a stuck engine."""

from __future__ import annotations

from msgspec import structs

from llmrun.engine.child.messages import Beat
from llmrun.serving.processes.supervisor import RestartPauses, ServingLimits, StepProgress

LIMITS = ServingLimits()


def test_pauses_grow_up_to_half_a_minute() -> None:
    pauses = RestartPauses(LIMITS)
    assert [pauses.after(1.0) for _ in range(10)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_pauses_start_again_after_a_minute_of_health() -> None:
    pauses = RestartPauses(LIMITS)
    assert [pauses.after(lived) for lived in (1.0, 1.0, 59.0, 60.0, 1.0)] == [0, 0.5, 1, 0, 0.5]


def working(steps: int, longest_step_s: float = 0.1) -> Beat:
    return Beat(busy=True, steps=steps, longest_step_s=longest_step_s)


def test_an_engine_is_stuck_without_a_step_for_10_seconds() -> None:
    progress = StepProgress(LIMITS, 100.0)
    progress.beat(working(1), 100.0)
    progress.stepped(105.0)
    progress.beat(working(1), 114.0)
    assert not progress.is_stuck(115.0)
    assert progress.age(115.0) == 10.0
    assert progress.is_stuck(115.1)
    progress.beat(working(2), 115.2)
    assert not progress.is_stuck(125.0)


def test_slow_steps_may_take_longer() -> None:
    progress = StepProgress(LIMITS, 0.0)
    progress.beat(working(1, longest_step_s=2.0), 1.0)
    assert not progress.is_stuck(40.0)
    assert progress.is_stuck(41.1)


def test_a_step_with_many_rows_may_take_longer() -> None:
    """An encoder runs a text of 8,192 tokens in one step."""
    progress = StepProgress(LIMITS, 0.0)
    progress.beat(structs.replace(working(1), patience=32.0), 1.0)
    assert not progress.is_stuck(321.0)
    assert progress.is_stuck(321.1)
    progress.beat(working(2), 321.2)
    assert progress.is_stuck(331.3)


def test_the_first_step_may_take_a_minute() -> None:
    progress = StepProgress(LIMITS, 0.0)
    progress.beat(working(0), 1.0)
    assert not progress.is_stuck(60.0)
    assert progress.is_stuck(60.1)


def test_an_idle_engine_is_stuck_only_without_beats() -> None:
    progress = StepProgress(LIMITS, 0.0)
    for now in range(100):
        progress.beat(Beat(busy=False, steps=7), float(now))
    assert progress.age(99.0) == 0.0
    assert not progress.is_stuck(109.0)
    assert progress.is_stuck(109.1)
