"""Handles the user's thinking options and shows the model's thinking."""

from __future__ import annotations

import sys
import time
from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.presets import THINKING

if TYPE_CHECKING:
    from llmrun.cli.arguments.options import AnswerFlags
    from llmrun.engine.base import Answering
    from llmrun.engine.requests import TextDelta
    from llmrun.options.settings import Settings


class ThinkingView:
    """Shows the thinking of one answer as it is generated.

    hidden  True to show only a message that the model is thinking
    stream  True to show each piece immediately, or False to show the thinking when it is complete
    """

    def __init__(self, *, hidden: bool, stream: bool = True) -> None:
        self._hidden = hidden
        self._stream = stream
        self._held: list[str] = []
        self._began: float | None = None

    def text(self, piece: str) -> None:
        now = time.monotonic()
        self._began = self._began or now
        if self._stream and not self._hidden:
            out.thinking(piece)
            return
        out.progress(f"thinking  {now - self._began:.0f} s")
        if not self._hidden:
            self._held.append(piece)

    def end(self) -> None:
        """Show the thinking that is still buffered, at the end of the answer."""
        out.thinking("".join(self._held))
        self._held = []


class CertainAnswer:
    """Buffers text until it is certain to be part of the answer and not of the thinking.

    On a terminal, text is written immediately, because a note can correct it later. Text in a pipe or a file
    cannot be corrected. If `stream` is false, all text is buffered until the end.
    """

    def __init__(self, *, stream: bool = True) -> None:
        self._stream = stream
        self._waits = not is_terminal(sys.stdout)
        self._held = ""
        self._began = time.monotonic()

    def passed(self, delta: TextDelta) -> str:
        self._held += delta.text
        if not self._stream:
            out.progress(f"answering  {time.monotonic() - self._began:.0f} s")
            return ""
        return "" if delta.tentative and self._waits else self.rest()

    def rest(self) -> str:
        """Clear the buffer and return its text. Call this method when the answer ends or the text is thinking."""
        held, self._held = self._held, ""
        return held


class Wish(NamedTuple):
    """The thinking options of a request. The fields are described in Request."""

    think: bool | None
    think_budget: int | None


def check_thinking(engine: Answering, flags: AnswerFlags, settings: Settings, typed: Container[str]) -> None:
    """Check that the open model supports the thinking options. Print a note about options that have no effect.

    Raises UsageError if the model cannot think as requested.

    typed  the names of the settings given for this run or conversation
    """
    known = engine.thinking
    if known is None:
        _tell_what_a_server_is_not_asked(settings, typed)
        return
    known.prepare()
    if known.style:
        out.detail(f"thinking   between {known.style.opening} and {known.style.closing[0]}")
    if flags.think:
        known.require()
    if flags.think is False and not known.can_think:
        out.note("--no-think has no effect: this model has no known thinking switch or tags")
    if flags.think_budget is not None and known.style is None:
        out.note("--think-budget has no effect: this model has no known thinking tags")
    if (names := _from_preset(settings)) and not known.can_think:
        assert settings.preset is not None
        out.note(f"preset {settings.preset.name}: {', '.join(names)}: no effect, because this model does not think")


def _tell_what_a_server_is_not_asked(settings: Settings, typed: Container[str]) -> None:
    known = (*_from_preset(settings), *(name for name in Wish._fields if name in typed))
    names = [name for name in Wish._fields if getattr(settings, name) is not None and name not in known]
    if names:
        out.note(f"{', '.join(names)}: not sent to the server, because these settings are for local models")


def wanted_thinking(engine: Answering, settings: Settings, typed: Container[str]) -> Wish:
    """Return the thinking options to request from the model.

    Options in `typed` take precedence over options from the environment, a preset or config.toml, which apply only if
    the model supports them.
    """
    think, budget = settings.think, settings.think_budget
    known = engine.thinking
    if known is None:  # a server may reject unknown options, so only options for its model are sent
        meant = _from_preset(settings)
        return Wish(*(getattr(settings, name) if name in typed or name in meant else None for name in Wish._fields))
    if think and budget == 0 and "think" in typed and "think_budget" not in typed:
        budget = None
    if think is None:
        return Wish(None, budget)
    known.has_switch  # noqa: B018  (the first detection is slow, so do it before the request is timed)
    return Wish(None if think and not known.can_think else think, budget)


def _from_preset(settings: Settings) -> list[str]:
    """Return the names of the thinking options whose values come from the preset."""
    values = {} if settings.preset is None else settings.preset.values
    return [name for name in THINKING if name in values and getattr(settings, name) == values[name]]
