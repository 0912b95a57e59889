"""Runs the tool calls of a model: shows every call, asks the user unless the tool is safe, and returns a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.cli.chatting.tools.call_view import call_rows, full_rows, result_row
from llmrun.engine.tools.tool import ToolInfo, ToolResult
from llmrun.engine.tools.toolbox import Toolbox

REFUSED = "The user did not allow this call."
NOBODY_ASKED = "This tool needs the user's confirmation, and nobody is there to give it."

Ask = Callable[[str], str | None]  # shows a question and returns the line that the user types; None at the end of input
Show = Callable[[Sequence[str]], None]  # shows rows to the user


class Permission(Enum):
    """The user's decision on whether a call may run."""

    YES = "y"
    NO = "n"
    ALWAYS = "a"


class ToolCalls:
    """Runs the calls of one chat.

    ask      asks the user; None if the chat is not interactive, so that only safe tools run
    show     shows rows, which may be untrusted
    waiting  returns a context manager to use while a tool runs
    """

    def __init__(
        self,
        toolbox: Toolbox,
        ask: Ask | None,
        show: Show,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._toolbox = toolbox
        self._ask = ask
        self._show = show
        self._waiting = waiting

    def run(self, name: str, arguments: Mapping[str, Any], cancelled: Callable[[], bool]) -> ToolResult:
        """Run a call and return its result for the model. Failures are results too. Raises Cancelled.

        Any LlmrunError is such a failure, because the call is saved already and needs a result. KeyboardInterrupt from
        `ask` is not caught.
        """
        try:
            refusal = self._refusal(name, arguments)
            if refusal is not None:
                self._show(["not run: it needs your confirmation"] if refusal == NOBODY_ASKED else ["not run"])
                return ToolResult(refusal, is_error=True)
            with self._waiting():
                result = self._toolbox.call(name, arguments, cancelled)
        except Cancelled:
            raise
        except LlmrunError as error:
            sentence = "; ".join(filter(None, [str(error), error.hint]))
            self._show([f"failed: {sentence}"])
            return ToolResult(sentence, is_error=True)
        self._show([result_row(result)])
        return result

    def _refusal(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Show a call, and return why it may not run, or None if it may. Raises ToolFailed for an unknown tool."""
        info = self._toolbox.describe(name)
        rows, complete = call_rows(info, arguments)
        self._show(rows)
        if info.is_safe:
            return None
        if self._ask is None:
            return NOBODY_ASKED
        permission = self._permission(self._ask, info, arguments, complete)
        if permission is Permission.ALWAYS:
            self._mark_safe(name)
        return REFUSED if permission is Permission.NO else None

    def _permission(self, ask: Ask, info: ToolInfo, arguments: Mapping[str, Any], complete: bool) -> Permission:
        if info.why_not:
            self._show([f"asking because {info.why_not}"])
        more = "[s]how details" if complete else "[s]how all of it"
        while True:
            typed = ask(f"run it? [y]es, [n]o, [a]lways for this tool, {more}: ")
            if typed is None:
                return Permission.NO
            word = typed.strip().lower()
            if word in ("s", "show"):
                self._show(full_rows(info, arguments))
            elif found := next((one for one in Permission if word in (one.value, one.name.lower())), None):
                return found

    def _mark_safe(self, name: str) -> None:
        """Remember the user's "always". If that fails, the call still runs, because the user has allowed it."""
        try:
            self._toolbox.mark_safe(name)
        except LlmrunError as error:
            self._show([f"this choice could not be saved: {error}"])
