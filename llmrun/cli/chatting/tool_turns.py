"""Runs a model's tool calls in a chat, and saves the calls and their results in the conversation.

Every call is shown, and the user is asked unless the tool is marked as safe. The slash command /tools lists the tools
or changes these marks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from llmrun.base.errors import Cancelled, LlmrunError, UsageError, shown
from llmrun.cli.chatting.events import ToolAnswered, ToolCalled
from llmrun.cli.chatting.tool_call_view import about_rows, call_rows, full_rows, parsed_arguments, result_row, tool_rows
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import discard_input, is_terminal
from llmrun.engine.tools.tool import ToolInfo, ToolResult
from llmrun.engine.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from llmrun.cli.chatting.plain import Turns
    from llmrun.cli.chatting.saying import ConversationRecord
    from llmrun.cli.chatting.signals import Signals
    from llmrun.engine.requests import ToolCall

_LONGEST_LINE = 1000  # bytes


def ask(question: str, stream: BinaryIO | None = None) -> str | None:
    """Show a question and return the line that the user types, or None at the end of input.

    Keys that were typed before the question are discarded, so that they cannot answer it by mistake. The terminal must
    be in its original modes (`Turns.lent`). If the user cannot see the question, because stderr is redirected, the
    result is also None.

    stream  None for standard input
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


_ALLOW, _ASK = "allow", "ask"


class ChatWithTools(Protocol):
    """A chat. `toolbox` is None if it was started without tools."""

    @property
    def toolbox(self) -> Toolbox | None: ...
    def reply(self, lines: Iterable[str]) -> None: ...
    def confirm(self, line: str) -> None: ...


def tools(chat: ChatWithTools, argument: str) -> None:
    """List the tools, describe one (`/tools NAME`), or change its mark (`/tools allow NAME`, `/tools ask NAME`).

    Raises UsageError, which does not end the chat.
    """
    if chat.toolbox is None:
        raise UsageError("/tools: this chat has no tools", hint="start it with --tools FILE")
    try:
        _run(chat, chat.toolbox, argument)
    except LlmrunError as error:  # there is no such tool, or the mark cannot be saved
        raise UsageError(str(error), hint=error.hint) from error


def _run(chat: ChatWithTools, toolbox: Toolbox, argument: str) -> None:
    verb, _, name = argument.partition(" ")
    name = name.strip()
    if verb == _ALLOW and name:
        toolbox.mark_safe(name)
        chat.confirm(f"{name} runs without asking, until its definition changes")
    elif verb == _ASK and name:
        toolbox.unmark(name)
        chat.confirm(f"{name} asks before every call")
    elif argument:
        info = toolbox.describe(argument)
        chat.reply([*tool_rows([info]), *about_rows(info)])
    else:
        found = [toolbox.describe(one) for one in toolbox.names]
        failures = [f"server {server} was left out: {why}" for server, why in toolbox.failures.items()]
        chat.reply([*(tool_rows(found) or ["there are no tools"]), *failures])


def tool_choices(chat: ChatWithTools) -> Iterable[tuple[str, str]]:
    """Return the possible arguments of /tools with their descriptions."""
    toolbox = chat.toolbox
    if toolbox is None:
        return []
    found = [toolbox.describe(name) for name in toolbox.names]
    return [
        *((info.name, info.description.partition("\n")[0]) for info in found),
        *((f"{_ASK} {info.name}", "ask before every call") for info in found if info.is_safe),
        *((f"{_ALLOW} {info.name}", "run without asking") for info in found if not info.is_safe),
    ]
