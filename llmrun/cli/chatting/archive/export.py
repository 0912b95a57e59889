"""Exports conversations as Markdown, or as JSON in which the messages have the format of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llmrun.base.amounts import counted
from llmrun.cli.chatting.archive.overview import model_name
from llmrun.cli.chatting.conversation import Conversation, Exchange, ToolRound
from llmrun.cli.chatting.events import Answered
from llmrun.cli.console.terminal import visible, visible_line

_REASONS = {"length": "cut", "cancelled": "stopped"}


def to_markdown(conversation: Conversation) -> str:
    """Convert a conversation to Markdown and make control characters visible."""
    model = visible_line(model_name(conversation))
    turns = counted(len(conversation.exchanges), "turn")
    parts = [f"# {visible_line(conversation.title)}", f"{model}, {visible_line(conversation.began.created)}, {turns}"]
    if conversation.system is not None:
        parts += ["## System", visible(conversation.system.strip())]
    for exchange in conversation.exchanges:
        parts += ["## You", visible(exchange.question.strip())]
        if exchange.rounds or exchange.began is not None:
            parts.append(f"## {model}")
        for one in exchange.rounds:
            parts += [*_thinking(one.answered.thinking or ""), visible(one.answered.text.strip()), *_calls(one)]
        if exchange.began is not None:
            parts += _thinking(exchange.thinking)
            parts += [visible(exchange.answer.strip()), *_ending(exchange)]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(name: str, conversation: Conversation) -> dict[str, Any]:
    """Convert a conversation to JSON values."""
    return {
        "name": name,
        "conversation": conversation.began.conversation,
        "title": conversation.title,
        "model": conversation.model,
        "created": conversation.began.created,
        "settings": dict(conversation.preferences),
        "messages": _messages(conversation),
    }


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for exchange in conversation.exchanges:
        messages.append({"role": "user", "content": exchange.question, "time": exchange.asked.time})
        for one in exchange.rounds:
            called, *results = one.messages()
            messages += [called | _ending_values(one.answered), *results]
        answered = exchange.answered()
        if answered is not None:
            thinking = {} if answered.thinking is None else {"reasoning_content": answered.thinking}
            told = {"role": "assistant", "content": answered.text, **thinking}
            messages.append(told | _ending_values(answered))
    return messages


def _ending_values(answered: Answered) -> dict[str, Any]:
    return {"finish_reason": answered.reason, "seed": answered.seed}


def _thinking(text: str) -> list[str]:
    if not text.strip():
        return []
    return ["<details><summary>Thinking</summary>", visible(text.strip()), "</details>"]


def _calls(one: ToolRound) -> Iterator[str]:
    """Yield the calls of an answer and their results as code blocks, whose text is not read as Markdown."""
    for call in one.calls:
        name = visible_line(call.name).replace("`", "'")
        yield f"Tool call: `{name}`"
        yield _code(call.arguments)
        yield "Result:"
        yield _code(one.result(call))


def _code(text: str) -> str:
    """Return a code block with a fence that is longer than any run of backticks in the text."""
    shown = visible(text.strip("\n"))
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{shown}\n{fence}"


def _ending(exchange: Exchange) -> list[str]:
    """Return a note that says why an answer is incomplete, or nothing if it is complete."""
    reason = exchange.ended.reason if exchange.ended else "interrupted"
    return [] if reason == "stop" else [f"*({_REASONS.get(reason, reason)})*"]
