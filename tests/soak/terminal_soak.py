"""Shows hostile answers on an in-memory terminal, in every way that llmrun has, and checks that they do no harm."""

from __future__ import annotations

import io
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from llmrun.cli.answers.markdown.view import MarkdownView
from llmrun.cli.console.output import Output
from tests.soak.driver import Broken, Case, Soak
from tests.support.cli.hostile_text import hostile_answer, in_pieces
from tests.support.cli.terminals import Terminal

CANARY = "what stood here before"
SIZES = ((80, 24), (40, 10), (20, 24), (11, 5))

# The allowed output: visible characters, newlines, and four escape sequences (colors, attributes, cursor up, erase
# below). None of these makes a terminal send a reply.
_SEEN = r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\n|\r"
_ATTRIBUTES = r"\x1b\[(?:[0123469]|3[1-6])(?:;(?:[123469]|3[1-6]))*m"
_ALLOWED = re.compile(rf"(?:{_SEEN}|{_ATTRIBUTES}|\x1b\[[1-9]\d?A|\x1b\[J)*")
_ALLOWED_PLAIN = re.compile(rf"(?:{_SEEN}|\t|{_ATTRIBUTES})*")
_FLOOD = re.compile("[\u0300-\u036f\u0489\u20dd\u0591\u0e47\u1ab0]{9}")


def terminal(soak: Soak) -> Iterator[Case]:
    """Show hostile answers: control sequences, raw and as HTML entities, in Markdown, and in pieces."""
    yield lambda number: soak_case(soak.seed, number)


class Breach(Broken):
    """Forbidden output reached the terminal."""


def by_markdown(source: random.Random, text: str, terminal: Terminal) -> None:
    """Show an answer as `chat` does."""
    now = [0.0]
    step = source.choice((0.0, 0.01, 1.0))
    view = MarkdownView(color=source.random() < 0.7, write=terminal.write, size=terminal.size, clock=lambda: now[0])
    for piece in in_pieces(source, text):
        now[0] += step
        view.text(piece)
    view.end()


def by_answer(source: random.Random, text: str, terminal: Terminal) -> None:
    """Show an answer as `generate` and plain terminals do."""
    with _streams(terminal):
        out = Output()
        for piece in in_pieces(source, text):
            out.answer(piece)
        out.end_answer()


def by_messages(source: random.Random, text: str, terminal: Terminal) -> None:
    """Show the text as a model, tensor or metadata name or a path, in notes, details, statistics, progress and
    errors."""
    with _streams(terminal):
        out = Output()
        out.verbose = True
        out.note(f"metadata: {text}")
        out.detail(f"tensor {text}")
        out.fields([text, "1 in", text])
        with patch("time.monotonic", side_effect=range(1000)):
            out.progress(text)
            out.progress(text)
            out.clear_progress()
        out.error(f"not a model: {text}: 1 seen", text)


def _streams(terminal: Terminal) -> Any:
    """Make the process's output streams the in-memory terminal."""

    class Stream(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            terminal.write(text)
            return len(text)

    stream = Stream()
    return patch.multiple(sys, stdout=stream, stderr=stream)


Way = Callable[[random.Random, str, Terminal], None]
WAYS: dict[str, tuple[Way, re.Pattern[str]]] = {
    "markdown": (by_markdown, _ALLOWED),
    "answer": (by_answer, _ALLOWED_PLAIN),
    "messages": (by_messages, _ALLOWED_PLAIN),
}


def soak_case(seed: int, case: int) -> str:
    """Show one random answer in one random way and return that way's name. Seed and case determine everything.

    Raises Breach with the forbidden output.
    """
    source = random.Random(f"{seed}:{case}")
    way = "markdown" if source.random() < 0.8 else source.choice(("answer", "messages"))
    show, allowed = WAYS[way]
    text = hostile_answer(source)
    terminal = Terminal(*source.choice(SIZES))
    terminal.write(f"{CANARY}\n")
    before = terminal.modes()
    terminal.written.clear()
    show(source, text, terminal)
    written = "".join(terminal.written)
    end = allowed.match(written).end()  # type: ignore[union-attr]  # it matches the empty text
    if end < len(written):
        raise Breach(f"{way}: {written[end : end + 20]!r} was written, for {text!r}")
    if (after := terminal.modes()) != before:
        changed = {name: after[name] for name in after if after[name] != before[name]}
        raise Breach(f"{way}: {changed} was changed by {text!r}")
    if terminal.rows()[0] != CANARY[: terminal.size()[0]].rstrip():
        raise Breach(f"{way}: earlier output was erased by {text!r}")
    if way == "markdown" and _FLOOD.search(written):
        raise Breach(f"{way}: too many combining marks in a row for {text!r}")
    return way
