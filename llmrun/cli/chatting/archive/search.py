"""Searches conversations for words.

A question, an answer, a tool call or a result matches if it contains all the words, ignoring case. From each match,
only the lines that contain at least one of the words are returned.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import LlmrunError
from llmrun.cli.chatting.conversation import Conversation, Exchange
from llmrun.cli.chatting.store import Store, read_conversation
from llmrun.cli.console.terminal import shortened, visible_line, width

if TYPE_CHECKING:
    from llmrun.cli.console.output import MarkedLine

MOST_LINES = 5  # lines shown per conversation
_CONTEXT = 20  # columns to show before the first match if a line is truncated
_QUESTION, _ANSWER = "  > ", "    "


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a question or an answer. Its pieces alternate between ordinary text and matches, starting with text."""

    is_question: bool
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Hit:
    """A conversation with one or more matching lines. `changed` is in seconds since the epoch."""

    name: str
    changed: float
    lines: list[Line]


def words_of(argument: str) -> list[str]:
    """Split the argument of /search into words. Quotes keep a phrase together."""
    try:
        words = shlex.split(argument)
    except ValueError:  # the argument has an unbalanced quote, such as an apostrophe
        words = argument.split()
    return [word for word in words if word.strip()]


def search_store(store: Store, words: Sequence[str], without: Path | None = None) -> tuple[list[Hit], int]:
    """Search all conversations and saved copies. Return the hits, newest first, and the number of unreadable files.

    The search skips the file `without`, and copies whose matching lines are the same as those of their original.
    Raises OSError if the folder cannot be read.
    """
    hits: list[Hit] = []
    known: set[tuple[str, tuple[Line, ...]]] = set()
    unreadable = 0
    for path in (*store.journals(), *store.named()):
        if path == without:
            continue
        try:
            found = read_conversation(path)
        except (LlmrunError, OSError):
            unreadable += 1
            continue
        lines = matching(found.conversation, words)
        same = (found.conversation.began.conversation, tuple(lines))
        if lines and same not in known:
            known.add(same)
            hits.append(Hit(path.stem, found.changed, lines))
    return sorted(hits, key=lambda hit: hit.changed, reverse=True), unreadable


def matching(conversation: Conversation, words: Sequence[str]) -> list[Line]:
    """Return the matching lines of a conversation."""
    patterns = [re.compile(re.escape(unicodedata.normalize("NFC", word)), re.IGNORECASE) for word in words]
    either = re.compile("|".join(f"(?:{pattern.pattern})" for pattern in patterns), re.IGNORECASE)
    lines = []
    for exchange in conversation.exchanges:
        for is_question, text in ((True, exchange.question), *((False, text) for text in _told(exchange))):
            shown = [visible_line(line) for line in unicodedata.normalize("NFC", text).splitlines()]
            if all(any(pattern.search(line) for line in shown) for pattern in patterns):
                lines += [Line(is_question, _pieces(line, either)) for line in shown if either.search(line)]
    return lines


def _told(exchange: Exchange) -> Iterator[str]:
    """Yield the texts that follow a question: its answers, and the calls between them with their results."""
    for one in exchange.rounds:
        yield one.answered.text
        for call in one.calls:
            yield f"{call.name} {call.arguments}"
            yield one.result(call)
    yield exchange.answer


def lines_of(hit: Hit, most: int, when: str = "") -> Iterator[MarkedLine]:
    """Yield a line with the hit's name, then its matching lines, each truncated to at most `most` columns."""
    yield [(f"{hit.name}  {when}".rstrip(), False)]
    for line in hit.lines[:MOST_LINES]:
        yield [(_QUESTION if line.is_question else _ANSWER, False), *_cut(line.pieces, most - len(_QUESTION))]
    more = len(hit.lines) - MOST_LINES
    if more > 0:
        yield [(f"    … {more} more line{'s' if more > 1 else ''}", False)]


def as_json(hit: Hit) -> dict[str, Any]:
    """Convert a hit, with all its matching lines, to JSON values."""
    lines = [{"role": "user" if line.is_question else "assistant", "text": line.text} for line in hit.lines]
    return {"name": hit.name, "changed": hit.changed, "lines": lines}


def _pieces(line: str, either: re.Pattern[str]) -> tuple[str, ...]:
    pieces = []
    done = 0
    for match in either.finditer(line):
        pieces += [line[done : match.start()], match[0]]
        done = match.end()
    return (*pieces, line[done:])


def _cut(pieces: Sequence[str], most: int) -> Iterator[tuple[str, bool]]:
    """Truncate a line to `most` columns around its first match."""
    before, *rest = pieces
    if width("".join(pieces)) <= most:
        left = most
    else:
        before = "…" + before[-_CONTEXT:] if width(before) > _CONTEXT else before
        left = most - 1  # reserve a column for the ellipsis at the end
    for number, piece in enumerate([before, *rest]):
        shown = shortened(piece, max(0, left))
        yield shown, number % 2 == 1
        left -= width(shown)
        if shown != piece:
            yield "…", False
            return
