"""Builds the table that `llmrun conversations` prints, which has one line per conversation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.base.amounts import format_age
from llmrun.base.errors import LlmrunError
from llmrun.cli.chatting.conversation import Conversation
from llmrun.cli.chatting.store import Store, read_conversation
from llmrun.cli.console.columns import narrowed
from llmrun.engine.remote.url import is_endpoint

_HEADER = ("NAME", "WHEN", "MODEL", "TURNS", "FIRST WORDS")
# The columns to drop on narrow terminals. FIRST WORDS is dropped early, because most names contain the first words.
_DROPPABLE = (("MODEL",), ("FIRST WORDS",), ("TURNS",))


@dataclass(frozen=True, slots=True)
class Listed:
    """A conversation in the list.

    conversation  None if the file cannot be read, in which case `problem` says why
    changed       modification time in seconds since the epoch
    """

    path: Path
    conversation: Conversation | None
    changed: float
    problem: str = ""

    @property
    def name(self) -> str:
        return self.path.stem


def listed(store: Store) -> list[Listed]:
    """Read all saved copies, and all conversations that have questions or are damaged. Return them newest first.

    Raises OSError if the folder cannot be read.
    """
    found = [_read(path) for path in (*store.journals(), *store.named())]
    said = [one for one in found if one.conversation is None or one.conversation.exchanges]
    return sorted(said, key=lambda one: one.changed, reverse=True)


def table(conversations: Sequence[Listed], now: float) -> list[str]:
    """Format conversations as a table with a header, and return its lines. `now` is in seconds since the epoch."""
    return narrowed(_HEADER, [_row(one, now) for one in conversations], ("TURNS",), _DROPPABLE)


def as_json(one: Listed, store: Store) -> dict[str, Any]:
    """Convert a listed conversation to JSON values, without its messages."""
    conversation = one.conversation
    return {
        "name": one.name,
        "file": str(one.path),
        "saved_copy": store.is_saved_copy(one.path),
        "conversation": conversation.began.conversation if conversation else "",
        "title": conversation.title if conversation else "",
        "model": conversation.model if conversation else "",
        "turns": len(conversation.exchanges) if conversation else 0,
        "created": conversation.began.created if conversation else "",
        "changed": one.changed,
        "problem": one.problem,
    }


def model_name(conversation: Conversation) -> str:
    """Return a short name for the conversation's model. For a file, it is the file name without .gguf."""
    model = conversation.model
    if is_endpoint(model):
        return model
    return os.path.basename(model).removesuffix(".gguf") or model  # noqa: PTH119  a model's name is not always a path


def _read(path: Path) -> Listed:
    try:
        found = read_conversation(path)
        return Listed(path, found.conversation, found.changed)
    except (LlmrunError, OSError) as error:
        return Listed(path, None, _changed(path), str(error))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _row(one: Listed, now: float) -> tuple[str, ...]:
    when = format_age(one.changed, now)
    if one.conversation is None:
        return (one.name, when, "", "", f"cannot be read: llmrun conversations show {one.name}")
    turns = str(len(one.conversation.exchanges))
    return (one.name, when, model_name(one.conversation), turns, one.conversation.title)
