"""Runs the tool calls of an answer, and saves them and their results in the conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from llmrun.cli.chatting.events import ToolAnswered, ToolCalled
from llmrun.cli.chatting.tools.calls import ToolCalls
from llmrun.cli.chatting.tools.question import ask
from llmrun.cli.console.output import out
from llmrun.errors import Cancelled

if TYPE_CHECKING:
    from llmrun.cli.chatting.record import ConversationRecord
    from llmrun.cli.chatting.screen import Turns
    from llmrun.cli.chatting.signals import Signals
    from llmrun.engine.requests import ToolCall
    from llmrun.tools.toolbox import Toolbox

MOST_ROUNDS: Final = 25  # answers with tool calls in a row, before a model that calls tools for ever is stopped
_STOPPED = "The user stopped this call."


class ToolTurns:
    """Runs the tool calls of a chat's answers."""

    def __init__(self, toolbox: Toolbox, turns: Turns, signals: Signals) -> None:
        self._turns = turns
        self._signals = signals
        self._calls = ToolCalls(toolbox, self._ask if turns.interactive else None, out.reply)

    def run(self, calls: Sequence[ToolCall], record: ConversationRecord) -> bool:
        """Run the calls of the last answer in order. Returns False if the user has stopped them.

        All calls are saved before the first one runs. A call without a result in the file was interrupted.
        """
        for call in calls:
            record.add(ToolCalled(call.id, call.name, call.arguments))
        stopped = False
        for call in calls:
            text = _STOPPED if stopped else self._result(call)
            stopped = stopped or text is None
            record.add(ToolAnswered(call.id, _STOPPED if text is None else text))
        return not stopped

    def _result(self, call: ToolCall) -> str | None:
        """Return the result of a call, or None if the user stops it with Ctrl-C."""
        try:
            arguments = _arguments(call.arguments)
        except ValueError as error:
            return f"The arguments are not a JSON object: {error}"
        try:
            return self._calls.run(call.name, arguments, lambda: self._signals.stop_wanted).text
        except (Cancelled, KeyboardInterrupt):
            out.note(f"stopped: {call.name}")
            return None

    def _ask(self, question: str) -> str | None:
        with self._turns.lent(), self._signals.reading():
            return ask(question)


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Raises ValueError."""
    try:
        arguments = json.loads(text or "{}")
    except RecursionError:
        raise ValueError("they are nested too deeply") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"they are a {type(arguments).__name__}")
    return arguments
