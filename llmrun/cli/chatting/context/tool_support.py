"""Checks what a model can do with the tools of a chat and with past tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.engine.tools.limits import Limits

if TYPE_CHECKING:
    from llmrun.cli.chatting.context.prompting import Prompting
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.engine.base import Answering

_RESULT_CHARACTERS = 2  # per token of the context; a tool's result then fills about half of it
_HINT = "use a model that was trained for tool calls, such as qwen3:4b"


def check_tools(engine: Answering, name: str) -> None:
    """Raise UsageError if a model cannot use the tools from --tools.

    name  the model's display name
    """
    if not _can_use_tools(engine):
        raise UsageError(f"--tools: {visible_line(name)} cannot call tools: {_reason(engine)}", hint=_HINT)


def check_past_calls(engine: Answering, name: str, conversation: Conversation) -> None:
    """Raise UsageError if a model cannot continue a conversation because of its tool calls."""
    if conversation.has_calls and not _can_read_calls(engine):
        raise UsageError(
            f"{visible_line(name)} cannot continue a conversation with tool calls: {_reason(engine)}", hint=_HINT
        )


def offer_tools(prompting: Prompting, engine: Answering, name: str, conversation: Conversation) -> None:
    """Offer the tools of a chat to another model if it can use them. Print a note about what it cannot do."""
    prompting.offers_tools = prompting.toolbox is None or _can_use_tools(engine)
    if prompting.toolbox is not None:
        prompting.toolbox.limit_results(longest_result(engine))
    if conversation.has_calls and not _can_read_calls(engine):
        out.note(
            f"{visible_line(name)} cannot read the tool calls of this conversation: {_reason(engine)}; "
            "/clear starts a new one, /model switches back"
        )
    elif not prompting.offers_tools:
        out.note(f"{visible_line(name)} answers without tools: {_reason(engine)}")


def longest_result(engine: Answering) -> int:
    """Return the maximum length of a tool's result, in characters, for the size of a model's context."""
    most = Limits().result
    size = engine.info.context_size  # 0 if a server does not report it
    return min(most, _RESULT_CHARACTERS * size) if size else most


def _can_use_tools(engine: Answering) -> bool:
    """Return whether a model can call tools and read their results. For remote models, assume that it can."""
    return engine.tools is None or (engine.tools.abilities.takes_tools and _can_read_calls(engine))


def _can_read_calls(engine: Answering) -> bool:
    if engine.tools is None:
        return True
    abilities = engine.tools.abilities
    return abilities.takes_results and abilities.tool_format is not None


def _reason(engine: Answering) -> str:
    """Return why a local model cannot use tools."""
    assert engine.tools is not None, "servers are not asked"
    if engine.tools.abilities.takes_tools:
        return "the format of its tool calls is unknown"
    return "its chat template does not support tools"
