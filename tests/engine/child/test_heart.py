"""Tests of heartbeats."""

from __future__ import annotations

import queue

import pytest

from llmrun.engine.base import EngineStatus
from llmrun.engine.child.messages import Beat
from llmrun.engine.child.serving import Heart

pytestmark = pytest.mark.push

PATIENCE_S = 30.0


STATUS = EngineStatus(
    running=1, waiting=2, free_tokens=3, prompt_tokens=4, cached_tokens=5, generated_tokens=6, preemptions=7
)


def test_an_idle_process_beats() -> None:
    beats: queue.Queue[Beat] = queue.Queue()
    Heart(beats.put)
    assert [beats.get(timeout=PATIENCE_S) for _ in range(2)] == [Beat(busy=False)] * 2


def test_a_hung_step_beats_without_progress() -> None:
    beats: queue.Queue[Beat] = queue.Queue()
    heart = Heart(beats.put)
    heart.step_begins()
    heart.step_ended(STATUS, busy=False, wait_s=1.5)
    heart.step_begins()
    for _ in range(2):
        beat = beats.get(timeout=PATIENCE_S)
        assert (beat.steps, beat.busy, beat.wait_s, beat.generated_tokens, beat.preemptions) == (1, True, 1.5, 6, 7)


def test_beats_during_a_large_step_ask_for_patience() -> None:
    beats: queue.Queue[Beat] = queue.Queue()
    heart = Heart(beats.put)
    heart.step_begins()
    heart.expect_rows(1024)
    assert beats.get(timeout=PATIENCE_S).patience == 4.0
    heart.step_ended(STATUS, busy=True, wait_s=0.0)
    heart.step_begins()
    heart.expect_rows(10)
    while beats.get(timeout=PATIENCE_S).patience != 1.0:
        pass


def test_not_every_step_has_a_beat() -> None:
    """A step of a small model takes a millisecond."""
    beats: queue.Queue[Beat] = queue.Queue()
    heart = Heart(beats.put)
    beats.get(timeout=PATIENCE_S)
    sent = 0
    for _ in range(2000):
        heart.step_begins()
        sent += heart.step_ended(STATUS, busy=True, wait_s=0.0) is not None
    assert sent < 500
    assert beats.get(timeout=PATIENCE_S).steps == 2000, "the figures of the last step, although it had no beat"
