"""What the user wants of a model's thinking, and what is shown of it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from llmrun.cli.output import out
from llmrun.cli.terminal import is_terminal

if TYPE_CHECKING:
    from llmrun.cli.flags import AnswerFlags
    from llmrun.engine.base import Answering
    from llmrun.engine.requests import TextDelta
    from llmrun.settings import Settings


class ThinkingView:
    """Shows one answer's thinking as it comes; `hidden`: only that there is some."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden
        self._began: float | None = None

    def text(self, piece: str) -> None:
        now = time.monotonic()
        self._began = self._began or now
        if self._hidden:
            out.progress(f"thinking  {now - self._began:.0f} s")
        else:
            out.thinking(piece)


class CertainAnswer:
    """Lets through what is certainly the answer. On a terminal that is everything: a note can follow what turns out
    to be none. Anywhere else nobody could take it back."""

    def __init__(self) -> None:
        self._waits = not is_terminal(sys.stdout)
        self._held = ""

    def passed(self, delta: TextDelta) -> str:
        self._held += delta.text
        return "" if delta.tentative and self._waits else self.rest()

    def rest(self) -> str:
        """What is still held, at the end of the answer, or because it was none."""
        held, self._held = self._held, ""
        return held


def check_thinking(engine: Answering, flags: AnswerFlags) -> None:
    """Look at what was typed with the model open: raise UsageError for what it cannot do, and say what may have no
    effect."""
    known = engine.thinking
    if known is None:
        return
    if flags.think:
        known.require()
    if flags.think is False and not known.can_think:
        out.note("--no-think: no switch and no tags of thinking are known for this model: what it writes is its answer")
    if flags.think_budget and known.style is None:
        out.note("--think-budget: no tags of thinking are known for this model: nothing is limited")


def wanted_thinking(engine: Answering, settings: Settings) -> bool | None:
    """What is asked of the model: a wish that was not made for this one counts only where it can be fulfilled."""
    known = engine.thinking
    if settings.think is None or known is None:
        return settings.think
    known.has_switch  # noqa: B018  (finding out takes a while the first time: not when the clock runs)
    return None if settings.think and not known.can_think else settings.think
