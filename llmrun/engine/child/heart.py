"""Heartbeats, by which the server sees that the engine makes progress."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from llmrun.engine.child.messages import Beat
from llmrun.engine.scheduling.predicting import MOST_ROWS
from llmrun.engine.stats import EngineStatus

_BEAT_S = 0.5  # the longest time between two beats
_STEP_BEAT_S = 0.05  # the shortest time between two beats that follow steps
_RECENT_STEPS = 64


class Heart:
    """Sends a beat at least twice a second, from a thread of its own, and provides the beats that follow steps.

    The thread beats although the engine may hang. Each beat therefore has the figures of the last step's end.
    """

    def __init__(self, send: Callable[[Beat], None]) -> None:
        self._send = send
        self._last = Beat(busy=False)
        self._sent = time.monotonic()
        self._step_began: float | None = None  # when the step that is running began
        self._patience = 1.0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def step_begins(self) -> None:
        """Note that a step is about to run."""
        self._step_began = time.monotonic()

    def expect_rows(self, rows: int) -> None:
        """Note that the step that is running has a pass with so many rows."""
        self._patience = max(1.0, rows / MOST_ROWS)

    def step_ended(self, status: EngineStatus, *, busy: bool, wait_s: float) -> Beat | None:
        """Note that the step has ended. Returns the beat to send, unless there was one a moment ago."""
        now = time.monotonic()
        began, self._step_began, self._patience = self._step_began, None, 1.0
        self._step_seconds.append(now - (began or now))
        self._last = Beat(
            *(busy, max(self._step_seconds), wait_s, self._last.steps + 1),
            *(
                status.free_tokens,
                status.prompt_tokens,
                status.cached_tokens,
                status.generated_tokens,
                status.preemptions,
            ),
        )
        if now - self._sent < _STEP_BEAT_S:
            return None
        self._sent = now
        return self._last

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            if (rest := self._sent + _BEAT_S - now) > 0:
                time.sleep(rest)
                continue
            self._sent = now
            busy = self._last.busy or self._step_began is not None
            self._send(replace(self._last, busy=busy, patience=self._patience))
