"""Runs a model's tool calls in a chat, and saves the calls and their results in the conversation.

Every call is shown, and the user is asked unless the tool is marked as safe.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from llmrun.base.errors import Cancelled, LlmrunError, shown
from llmrun.cli.chatting.events import ToolAnswered, ToolCalled
from llmrun.cli.chatting.tool_call_view import call_rows, full_rows, parsed_arguments, result_row
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import discard_input, is_terminal

if TYPE_CHECKING:
    from llmrun.cli.chatting.plain import Turns
    from llmrun.cli.chatting.saying import ConversationRecord
    from llmrun.cli.chatting.signals import Signals
    from llmrun.engine.requests import ToolCall
    from llmrun.engine.tools.toolbox import Toolbox

_LONGEST_LINE = 1000  # maximum length of a line in bytes


def ask(question: str, stream: BinaryIO | None = None) -> str | None:
    """Show a question and return the line that the user types, or None at the end of input.

    Keys that were typed before the question are discarded, so that stray keys do not answer the question. The terminal
    must be in its original modes (`Turns.lent`). Return None, too, if the user cannot see the question because stderr
    is redirected.

    stream  the stream to read from, or None for standard input
    """
    if stream is None and not is_terminal(sys.stderr):
        out.note("calls cannot be confirmed, because standard error is not a terminal")
        return None
    stream = stream or sys.stdin.buffer
    if stream.isatty():
        discard_input(stream)
    out.prompt(question)
    line = stream.readline(_LONGEST_LINE)
    return line.decode(errors="replace").strip() if line else None


REFUSED = "The user did not allow this call."
NOBODY_ASKED = "This tool needs the user's confirmation, and nobody is there to give it."
MOST_ROUNDS: Final = 25  # maximum number of consecutive answers with tool calls, because a model might never stop
CONTINUES: Final = "/retry lets the model continue"
_STOPPED = "The user stopped this call."
_MOST_QUOTED = 1000  # characters of invalid arguments that are repeated to the model


class ToolTurns:
    """Runs the tool calls of a chat's answers."""

    def __init__(self, toolbox: Toolbox, turns: Turns, signals: Signals) -> None:
        self._toolbox = toolbox
        self._turns = turns
        self._signals = signals

    def refresh(self) -> None:
        """List the tools again for servers that have reported a change. On Ctrl-C, keep the old list."""
        with suppress(Cancelled), self._turns.answering():
            self._toolbox.refresh(lambda: self._signals.stop_wanted)
        out.clear_progress()

    def run(self, calls: Sequence[ToolCall], record: ConversationRecord) -> bool:
        """Run the calls of the last answer in order. Returns False if the user has stopped the calls.

        All calls are saved before the first call runs. A call without a result in the file was interrupted.
        """
        for call in calls:
            record.add(ToolCalled(call.id, call.name, call.arguments))
        if record.conversation.exchanges[-1].rounds[-1].answered.text:
            out.reply([""])
        stopped = False
        for call in calls:
            text = None if stopped else self._result(call)
            stopped = text is None
            record.add(ToolAnswered(call.id, _STOPPED if text is None else text))
        if not stopped:
            out.reply([""])
        return not stopped

    def _result(self, call: ToolCall) -> str | None:
        """Return the result of a call, or None if the user stops it with Ctrl-C, possibly before it begins."""
        if not self._signals.stop_wanted:
            try:
                arguments = parsed_arguments(call.arguments)
            except ValueError as error:
                out.note(f"tool {shown(call.name)}: the arguments are not a valid JSON object: {error}")
                return f"The arguments are not a valid JSON object: {error}. You wrote: {call.arguments[:_MOST_QUOTED]}"
            with suppress(Cancelled, KeyboardInterrupt):
                return self._run(call.name, arguments)
        out.note(f"stopped: tool {shown(call.name)}; {CONTINUES}")
        return None

    def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a call and return its result for the model. Raises Cancelled, or KeyboardInterrupt during the question.

        Any other LlmrunError becomes the result, because every saved call needs a result.
        """
        try:
            refusal = self._refusal(name, arguments)
            if refusal is not None:
                out.reply(["not run: the call needs your confirmation" if refusal == NOBODY_ASKED else "not run"])
                return refusal
            with self._turns.answering():
                result = self._toolbox.call(name, arguments, self._is_stopped)
        except Cancelled:
            raise
        except LlmrunError as error:
            sentence = "; ".join(filter(None, [str(error), error.hint]))
            out.reply([f"failed: {sentence}"])
            return sentence
        out.reply([result_row(result)])
        return result.text

    def _refusal(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Show a call, and return why the call may not run, or None if it may. Raises ToolFailed for unknown tools."""
        info = self._toolbox.describe(name)
        rows, complete = call_rows(info, arguments)
        out.reply(rows)
        if info.is_safe:
            return None
        if not self._turns.interactive:
            return NOBODY_ASKED
        if info.why_not:
            out.reply([f"asking because {info.why_not}"])
        more = "[s]how details" if complete else "[s]how all of it"
        while True:
            typed = self._ask(f"run it? [y]es, [n]o, [a]lways for this tool, {more}: ")
            word = "n" if typed is None else typed.lower()
            if word in ("s", "show"):
                out.reply(full_rows(info, arguments))
            elif word in ("n", "no"):
                return REFUSED
            elif word in ("a", "always"):
                self._mark_safe(name)
                return None
            elif word in ("y", "yes"):
                return None

    def _mark_safe(self, name: str) -> None:
        """Save the user's answer "always". If saving fails, the call still runs, because the user has allowed it."""
        try:
            self._toolbox.mark_safe(name)
        except LlmrunError as error:
            out.reply([f"this choice could not be saved: {error}"])

    def _is_stopped(self) -> bool:
        """Return whether the user wants to stop the call that is running. The toolbox polls this method."""
        out.progress("waiting for the tool")
        return self._signals.stop_wanted

    def _ask(self, question: str) -> str | None:
        line = None
        try:
            with self._turns.lent(), self._signals.reading():
                line = ask(question)
        finally:
            if line is None:
                out.prompt("\n")
        return line
