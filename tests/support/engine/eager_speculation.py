"""Speculation that runs every draft in full, whatever it costs, for tests of what the engine does with drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmrun.engine.costs import StepCosts, StepSize
from llmrun.engine.drafting.base import Drafter, DraftSource, Kind
from llmrun.engine.drafting.pace import AnswerPace, StepPlan
from llmrun.engine.engine import Engine
from llmrun.engine.scheduling.scheduler import Speculation


class EagerPlan(StepPlan):
    """Finds every draft worth running."""

    def best_length(self, kinds: Sequence[Kind], pace: AnswerPace, depth: int) -> tuple[int, float]:
        return len(kinds), math.inf

    def promises(self, drafter: Drafter, speed: float, pace: AnswerPace, depth: int) -> bool:
        return True

    def worth(self, drafter: Drafter, pace: AnswerPace, depth: int, kinds: Sequence[Kind]) -> bool:
        return True


class EagerSpeculation(Speculation):
    """Drafts from the first step on."""

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        super().__init__(sources, StepCosts())
        self._costs.observe(StepSize(1, 1, 0, 0), 0, 0.001)

    def _new_plan(self, size: StepSize) -> StepPlan:
        return EagerPlan(self._costs, size)


def speculate_eagerly(engine: Engine, sources: Sequence[DraftSource]) -> None:
    """Let an engine that has no requests run every draft in full."""
    speculation = EagerSpeculation(sources)
    engine._speculation = engine._requests._speculation = engine._scheduler._speculation = speculation
