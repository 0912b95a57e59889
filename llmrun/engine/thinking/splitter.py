"""Splits the streamed text of a model into thinking and answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.engine.requests import ToolCallDelta

_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_BETWEEN = "\n\n"  # separates two blocks of thinking, or two parts of the answer


class Phase(Enum):
    """The current part of a model's output."""

    BEGINNING = auto()  # only whitespace so far
    THINKING = auto()
    THOUGHT = auto()  # after thinking, before the first text of the answer
    ANSWERING = auto()


@dataclass(frozen=True, slots=True)
class Marks:
    """The tags of a ThinkingStyle as they appear in the text passed to `feed`."""

    opening: str
    closing: tuple[str, ...]
    headers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    anywhere: bool = False


@dataclass(slots=True)
class Split:
    """A piece of thinking, followed by a piece of the answer.

    `unopened` is True if the answer returned by earlier splits was thinking, because the model closed a thinking block
    that it never opened. `calls` are pieces of tool calls, which decoders find in the answer.
    """

    thought: str = ""
    answer: str = ""
    unopened: bool = False
    calls: tuple[ToolCallDelta, ...] = ()


class ThinkingSplitter:
    """A splitter for streamed text. It returns text as soon as it can tell whether the text is thinking or answer.

    Tags are recognized only in certain places: `opening` before the answer has started, and `closing` during thinking.
    If `may_close` is True and there has been no thinking yet, `closing` is also recognized in the answer, at the
    beginning of a line outside code blocks. Elsewhere, a tag is ordinary text. Whitespace around thinking belongs
    to the tags. Tags are removed from the output; all other text is kept. The result does not depend on how the text
    is chunked.

    opened       True if the prompt ends inside a thinking block
    may_close    True if a closing tag may end thinking that was never opened
    """

    def __init__(self, marks: Marks, *, opened: bool = False, may_close: bool = True) -> None:
        self._marks = marks
        self.phase = Phase.THINKING if opened else Phase.BEGINNING
        self._may_close = may_close and not opened and not marks.anywhere
        self._may_open = True
        self._held = ""
        self._said: list[str] = []  # the answer so far, while a closing tag may still turn it into thinking
        self._thoughts = self._answers = 0  # number of thinking blocks and answer parts so far
        self._in_block = False
        self._split = Split()
        self.closed_by = ""  # the tag that ended the last block of thinking

    @property
    def may_be_closing(self) -> bool:
        """True if the text so far ends with the beginning of a closing tag."""
        return self.phase is Phase.THINKING and _begun(self._held, self._marks.closing) > 0

    @property
    def _openings(self) -> tuple[str, ...]:
        return (self._marks.opening,) if self._may_open else ()

    @property
    def tentative(self) -> bool:
        """True while a later closing tag may still turn the answer so far into thinking."""
        return self.phase is Phase.ANSWERING and self._may_close

    def disallow_thinking(self) -> None:
        """Treat any further opening tag as text."""
        self._may_open = False

    def feed(self, text: str) -> Split:
        """Add text and return what can be shown."""
        return self._take(text, final=False)

    def finish(self) -> Split:
        """End the output and return the buffered text."""
        return self._take("", final=True)

    def _take(self, text: str, *, final: bool) -> Split:
        self._held += text
        self._split = Split()
        while self._held and self._step(final):
            pass
        if final:
            self._held = ""
        return self._split

    def _step(self, final: bool) -> bool:
        """Process the next tag or piece of the buffered text. Returns False if more text is needed."""
        if self.phase is Phase.THINKING:
            return self._thinking(final)
        if self.phase is Phase.ANSWERING:
            return self._answering(final)
        return self._before_an_answer(final)

    def _before_an_answer(self, final: bool) -> bool:
        marks = (*self._openings, *self._marks.closing, *self._marks.headers)
        rest = self._held.lstrip()
        if any(mark.startswith(rest) and mark != rest for mark in marks) and not final:
            return False
        mark = max((mark for mark in marks if rest.startswith(mark)), key=len, default=None)
        if mark is not None:
            self._held = rest.removeprefix(mark)
            self._enter(Phase.THINKING if mark == self._marks.opening else Phase.THOUGHT)
            return True
        if self.phase is Phase.THOUGHT:
            self._held = rest
        self._enter(Phase.ANSWERING)
        return True

    def _thinking(self, final: bool) -> bool:
        found = _first_completed(self._held, self._marks.closing)
        if found is not None:
            start, mark = found
            self.closed_by = mark
            self._think(self._held[:start].rstrip())
            self._held = self._held[start + len(mark) :]
            self._enter(Phase.THOUGHT)
            return True
        end = len(self._held) - (0 if final else _begun(self._held, self._marks.closing))
        thought = self._held[:end].rstrip()
        self._think(thought)
        self._held = self._held[len(thought) :]
        return False

    def _answering(self, final: bool) -> bool:
        marks = self._marks
        known = (*self._openings, *marks.headers) if marks.anywhere else marks.closing if self._may_close else ()
        found = _first_completed(self._held, known)
        if found is None:
            self._answer_all_but_end(final, known)
            return False
        start, mark = found
        after = start + len(mark)
        if marks.anywhere:
            self._answer(self._held[:start])
            self._enter(Phase.THINKING if mark == marks.opening else Phase.THOUGHT)
        elif self._is_mark_after(self._held[:start]):
            self._turn_into_thinking(self._held[:start])
        else:
            self._answer(self._held[:after])
        self._held = self._held[after:]
        return True

    def _answer_all_but_end(self, final: bool, known: tuple[str, ...]) -> None:
        trailers = self._marks.trailers
        whole = self._held.rstrip()
        ends = [len(whole) - len(trailer) for trailer in trailers if whole.endswith(trailer)]
        if final:
            self._answer(self._held[: min(ends)] if ends else self._held)
            return
        end = min([*ends, len(self._held) - _begun(self._held, (*known, *trailers))])
        self._answer(self._held[:end])
        self._held = self._held[end:]

    def _is_mark_after(self, new: str) -> bool:
        before = "".join(self._said) + new
        return (not before or before.endswith("\n")) and len(_FENCE.findall(before)) % 2 == 0

    def _turn_into_thinking(self, new: str) -> None:
        """Reclassify the whole answer so far, and the new text, as thinking."""
        earlier = len("".join(self._said)) > len(self._split.answer)
        self._split = Split(thought=self._split.answer + new, unopened=earlier)
        self._thoughts, self._answers = 1, 0
        self._enter(Phase.THOUGHT)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._in_block = False
        if phase is Phase.THINKING or phase is Phase.THOUGHT:
            self._may_close = False
            self._said = []

    def _think(self, text: str) -> None:
        text = text if self._in_block else text.lstrip()
        if text and not self._in_block:
            self._in_block = True
            text = _BETWEEN + text if self._thoughts else text
            self._thoughts += 1
        self._split.thought += text

    def _answer(self, text: str) -> None:
        if text and not self._in_block:
            self._in_block = True
            text = _BETWEEN + text if self._answers else text
            self._answers += 1
        if self._may_close:
            self._said.append(text)
        self._split.answer += text


def _first_completed(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Return (start, tag) of the tag that ends first, or None.

    If two tags end at the same character, the longer one wins. The result therefore does not depend on how the text is
    chunked.
    """
    found = [(at + len(mark), at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    _, start, mark = min(found)
    return start, mark


def _begun(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest suffix of the text that is a prefix of a tag."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
