"""The slash command /tools, which lists the tools or changes whether one runs without confirmation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.chatting.tools.call_view import about_rows, tool_rows
from llmrun.engine.tools.toolbox import Toolbox

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
