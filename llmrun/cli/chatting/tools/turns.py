"""Runs the tool calls of an answer, and saves them and their results in the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import Cancelled
from llmrun.cli.chatting.events import ToolAnswered, ToolCalled
from llmrun.cli.chatting.tools.arguments import parsed_arguments
from llmrun.cli.chatting.tools.calls import ToolCalls
from llmrun.cli.chatting.tools.question import ask
from llmrun.cli.console.output import out
from llmrun.formats.gguf.problems import shown

if TYPE_CHECKING:
    from llmrun.cli.chatting.record import ConversationRecord
    from llmrun.cli.chatting.screen import Turns
    from llmrun.cli.chatting.signals import Signals
    from llmrun.engine.requests import ToolCall
    from llmrun.engine.tools.toolbox import Toolbox

MOST_ROUNDS: Final = 25  # answers with tool calls in a row, after which the model is stopped, as it might never end
CONTINUES: Final = "/retry lets the model continue"
_STOPPED = "The user stopped this call."
_MOST_QUOTED = 1000  # characters of invalid arguments that are repeated to the model


class ToolTurns:
    """Runs the tool calls of a chat's answers."""

    def __init__(self, toolbox: Toolbox, turns: Turns, signals: Signals) -> None:
        self._toolbox = toolbox
        self._turns = turns
        self._signals = signals
        self._calls = ToolCalls(toolbox, self._ask if turns.interactive else None, out.reply, turns.answering)

    def refresh(self) -> None:
        """List the tools again for servers that have reported a change. Ctrl-C keeps the old list."""
        with suppress(Cancelled), self._turns.answering():
            self._toolbox.refresh(lambda: self._signals.stop_wanted)
        out.clear_progress()

    def run(self, calls: Sequence[ToolCall], record: ConversationRecord) -> bool:
        """Run the calls of the last answer in order. Returns False if the user has stopped them.

        All calls are saved before the first one runs. A call without a result in the file was interrupted.
        """
        for call in calls:
            record.add(ToolCalled(call.id, call.name, call.arguments))
        if record.conversation.exchanges[-1].rounds[-1].answered.text:
            out.reply([""])
        stopped = False
        for call in calls:
            text = _STOPPED if stopped else self._result(call)
            stopped = stopped or text is None
            record.add(ToolAnswered(call.id, _STOPPED if text is None else text))
        if not stopped:
            out.reply([""])
        return not stopped

    def _result(self, call: ToolCall) -> str | None:
        """Return the result of a call, or None if the user stops it with Ctrl-C, possibly before it begins."""
        if self._signals.stop_wanted:
            self._tell_stopped(call)
            return None
        try:
            arguments = parsed_arguments(call.arguments)
        except ValueError as error:
            out.note(f"tool {shown(call.name)}: the arguments are not a valid JSON object: {error}")
            return f"The arguments are not a valid JSON object: {error}. You wrote: {call.arguments[:_MOST_QUOTED]}"
        try:
            return self._calls.run(call.name, arguments, self._is_stopped).text
        except (Cancelled, KeyboardInterrupt):
            self._tell_stopped(call)
            return None

    def _tell_stopped(self, call: ToolCall) -> None:
        out.note(f"stopped: tool {shown(call.name)}; {CONTINUES}")

    def _is_stopped(self) -> bool:
        """Return whether the user wants to stop the call that is running. Called several times a second."""
        out.progress("waiting for the tool")
        return self._signals.stop_wanted

    def _ask(self, question: str) -> str | None:
        try:
            with self._turns.lent(), self._signals.reading():
                line = ask(question)
        except KeyboardInterrupt:
            out.prompt("\n")
            raise
        if line is None:
            out.prompt("\n")
        return line
