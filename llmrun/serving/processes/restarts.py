"""The pauses between restarts, and the time limit for steps. Nothing here looks at a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llmrun.engine.child.messages import Beat
    from llmrun.serving.processes.limits import ServingLimits

_LONGEST_STEPS: Final = 20  # times the longest recent step
_BEFORE_FIRST_STEP: Final = 6  # times `stuck_s`; the first step may have to read the weights from a slow disk


class RestartPauses:
    """The pauses before restarts: none before the first one, then growing ones."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._next = 0.0

    def after(self, lived_s: float) -> float:
        """Return the pause in seconds after a process that was ready for `lived_s`."""
        limits = self._limits
        pause = 0.0 if lived_s >= limits.healthy_s else self._next
        self._next = min(max(2 * pause, limits.first_pause_s), limits.max_pause_s)
        return pause


class StepProgress:
    """The time of an engine's last progress, in seconds of one monotonic clock.

    An idle engine makes progress whenever it beats.
    """

    def __init__(self, limits: ServingLimits, now: float) -> None:
        self._stuck_s = limits.stuck_s
        self._last = now
        self._steps = 0
        self._longest_step_s = 0.0
        self._patience = 1.0

    def stepped(self, now: float) -> None:
        """Note that a step has ended, or that the time until now does not count."""
        self._last = now

    def beat(self, beat: Beat, now: float) -> None:
        """Note a beat."""
        if not beat.busy or beat.steps != self._steps:
            self._last = now
        self._steps = beat.steps
        self._longest_step_s = beat.longest_step_s
        self._patience = beat.patience

    def age(self, now: float) -> float:
        """Return the seconds since the last progress."""
        return now - self._last

    def is_stuck(self, now: float) -> bool:
        """Return whether the engine has made no progress for so long that it never will."""
        limit = max(self._stuck_s, _LONGEST_STEPS * self._longest_step_s)
        if not self._steps:
            limit = max(limit, _BEFORE_FIRST_STEP * self._stuck_s)
        return self.age(now) > self._patience * limit
