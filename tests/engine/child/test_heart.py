"""Tests of heartbeats."""

from __future__ import annotations

import queue

from llmrun.engine.child.heart import Heart
from llmrun.engine.child.messages import Beat
from llmrun.engine.child.served_engine import EngineStatus

PATIENCE_S = 30.0


def status(steps: int) -> EngineStatus:
    return EngineStatus(steps, 1, 2, 3, 4, 5, 6)


def test_an_idle_process_beats() -> None:
    beats: queue.Queue[Beat] = queue.Queue()
    Heart(beats.put)
    assert [beats.get(timeout=PATIENCE_S) for _ in range(2)] == [Beat(busy=False)] * 2


def test_a_hung_step_beats_without_progress() -> None:
    beats: queue.Queue[Beat] = queue.Queue()
    heart = Heart(beats.put)
    heart.step_begins()
    heart.step_ended(status(7), busy=False, wait_s=1.5)
    heart.step_begins()
    for _ in range(2):
        beat = beats.get(timeout=PATIENCE_S)
        assert (beat.steps, beat.busy, beat.wait_s, beat.generated_tokens) == (7, True, 1.5, 6)


def test_not_every_step_has_a_beat() -> None:
    """A step of a small model takes a millisecond."""
    beats: queue.Queue[Beat] = queue.Queue()
    heart = Heart(beats.put)
    beats.get(timeout=PATIENCE_S)
    sent = 0
    for number in range(2000):
        heart.step_begins()
        sent += heart.step_ended(status(number), busy=True, wait_s=0.0) is not None
    assert sent < 500
    assert beats.get(timeout=PATIENCE_S).steps == 1999, "the figures of the last step, although it had no beat"
