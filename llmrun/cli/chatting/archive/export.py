"""Exports conversations as Markdown, or as JSON in which the messages have the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from llmrun.amounts import counted
from llmrun.cli.chatting.archive.overview import model_name
from llmrun.cli.chatting.conversation import Conversation, Exchange
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
        if exchange.began is not None:
            parts.append(f"## {model}")
            parts += _thinking(exchange)
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
        answered = exchange.answered()
        if answered is None:
            continue
        thinking = {} if answered.thinking is None else {"reasoning_content": answered.thinking}
        messages.append(
            {
                "role": "assistant",
                "content": answered.text,
                **thinking,
                "finish_reason": answered.reason,
                "seed": answered.seed,
            }
        )
    return messages


def _thinking(exchange: Exchange) -> list[str]:
    if not exchange.thinking.strip():
        return []
    return ["<details><summary>Thinking</summary>", visible(exchange.thinking.strip()), "</details>"]


def _ending(exchange: Exchange) -> list[str]:
    """Return a note that says why an answer is incomplete, or nothing if it is complete."""
    reason = exchange.ended.reason if exchange.ended else "interrupted"
    return [] if reason == "stop" else [f"*({_REASONS.get(reason, reason)})*"]
