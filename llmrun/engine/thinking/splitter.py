"""The text of a model as it comes, split into what it thinks and what it answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_BETWEEN = "\n\n"  # two stretches of thinking, or two of the answer


class Phase(Enum):
    BEGINNING = auto()  # nothing but white space has come
    THINKING = auto()
    THOUGHT = auto()  # thinking is over, and no text of the answer has come
    ANSWERING = auto()


@dataclass(frozen=True, slots=True)
class Marks:
    """A style's texts as they stand in the text that is fed: see ThinkingStyle."""

    opening: str
    closing: tuple[str, ...]
    headers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    anywhere: bool = False


@dataclass(slots=True)
class Split:
    """`thought` comes before `answer`. `unopened`: what was given out as an answer before all this was thinking: the
    model ended what it had never begun."""

    thought: str = ""
    answer: str = ""
    unopened: bool = False


class ThinkingSplitter:
    """Gives out text as soon as it is certain what it is; how the text is cut into pieces makes no difference.

    A mark counts only where it can be one: `opening` before the answer has begun, `closing` while the model thinks,
    and where it has not thought, at the beginning of a line outside of code blocks. Anywhere else it is text. White
    space around thinking belongs to the marks. Nothing else is lost, and no part of a mark is given out.

    opened       the prompt has begun the thinking
    may_close    thinking that was never opened may be closed: the prompt said nothing of it
    """

    def __init__(self, marks: Marks, *, opened: bool = False, may_close: bool = True) -> None:
        self._marks = marks
        self.phase = Phase.THINKING if opened else Phase.BEGINNING
        self._may_close = may_close and not opened and not marks.anywhere
        self._may_open = True
        self._held = ""
        self._said: list[str] = []  # the answer so far, while it may turn out to have been thinking
        self._thoughts = self._answers = 0  # stretches of each that have begun
        self._in_stretch = False
        self._split = Split()

    @property
    def may_be_closing(self) -> bool:
        """The model is perhaps just ending its thinking."""
        return self.phase is Phase.THINKING and _begun(self._held, self._marks.closing) > 0

    @property
    def _openings(self) -> tuple[str, ...]:
        return (self._marks.opening,) if self._may_open else ()

    @property
    def tentative(self) -> bool:
        """The answer so far may turn out to have been thinking."""
        return self.phase is Phase.ANSWERING and self._may_close

    def think_no_more(self) -> None:
        """From here on a mark that begins thinking is text."""
        self._may_open = False

    def feed(self, text: str) -> Split:
        return self._take(text, final=False)

    def finish(self) -> Split:
        """No more text will come: what is still held."""
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
        """Take one thing from what is held; False when nothing more is certain."""
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
        found = _completed_first(self._held, self._marks.closing)
        if found is not None:
            start, mark = found
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
        found = _completed_first(self._held, known)
        if found is None:
            self._answer_but_for_its_end(final, known)
            return False
        start, mark = found
        after = start + len(mark)
        if marks.anywhere:
            self._answer(self._held[:start])
            self._enter(Phase.THINKING if mark == marks.opening else Phase.THOUGHT)
        elif self._is_mark_after(self._held[:start]):
            self._was_thinking(self._held[:start])
        else:
            self._answer(self._held[:after])
        self._held = self._held[after:]
        return True

    def _answer_but_for_its_end(self, final: bool, known: tuple[str, ...]) -> None:
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

    def _was_thinking(self, new: str) -> None:
        """All of the answer so far was thinking, and so is what is new."""
        earlier = len("".join(self._said)) > len(self._split.answer)
        self._split = Split(thought=self._split.answer + new, unopened=earlier)
        self._thoughts, self._answers = 1, 0
        self._enter(Phase.THOUGHT)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._in_stretch = False
        if phase is Phase.THINKING or phase is Phase.THOUGHT:
            self._may_close = False
            self._said = []

    def _think(self, text: str) -> None:
        text = text if self._in_stretch else text.lstrip()
        if text and not self._in_stretch:
            self._in_stretch = True
            text = _BETWEEN + text if self._thoughts else text
            self._thoughts += 1
        self._split.thought += text

    def _answer(self, text: str) -> None:
        if text and not self._in_stretch:
            self._in_stretch = True
            text = _BETWEEN + text if self._answers else text
            self._answers += 1
        if self._may_close:
            self._said.append(text)
        self._split.answer += text


def _completed_first(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """(where it begins, the mark): of several the one whose end comes first, and of two that end together the longer
    one: that does not depend on how the text is cut."""
    found = [(at + len(mark), at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    _, start, mark = min(found)
    return start, mark


def _begun(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of text with which a mark begins."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
