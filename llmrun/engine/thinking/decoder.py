"""Decodes the tokens of one answer into thinking and answer text."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from llmrun.engine.streaming import StreamingDecoder
from llmrun.engine.thinking.splitter import Marks, Phase, Split, ThinkingSplitter

if TYPE_CHECKING:
    from llmrun.engine.requests import ToolCallDelta
    from llmrun.engine.thinking.styles import ThinkingStyle
    from llmrun.model.tokenizers.base import Tokenizer

# Inside the splitter, an unpaired surrogate stands for each control token in a tag. Decoded text never contains
# surrogates, so a model that spells out a tag in ordinary tokens does not produce a tag.
_FIRST_PLACEHOLDER = 0xD800


@dataclass(frozen=True, slots=True)
class Spelling:
    """A style's tags with control tokens replaced by single placeholder characters.

    placeholders  maps the id of a control token to its placeholder in `marks`
    texts         maps the code point of a placeholder to the token's text
    """

    marks: Marks
    placeholders: dict[int, str]
    texts: dict[int, str]


class Placeholders:
    """Placeholders for the control tokens in a model's tags. Tags that share a token share its placeholder.

    characters  maps the id of a control token to its placeholder
    texts       maps the code point of a placeholder to the token's text
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters: dict[int, str] = {}
        self.texts: dict[int, str] = {}

    def spelled(self, mark: str) -> str:
        """Return a tag with its control tokens replaced by placeholders."""
        text = ""
        for token in self._tokenizer.encode(mark, add_special=False, parse_special=True).tolist():
            name = self._tokenizer.token_text(token)
            if self._tokenizer.token_bytes(token) or not name or (at := mark.find(name)) < 0:
                continue
            character = self.characters.setdefault(token, chr(_FIRST_PLACEHOLDER + len(self.characters)))
            self.texts[ord(character)] = name
            text += mark[:at] + character
            mark = mark[at + len(name) :]
        return text + mark


def spelled(style: ThinkingStyle, tokenizer: Tokenizer, placeholders: Placeholders | None = None) -> Spelling:
    """Return a style's tags as spelled in a vocabulary, with placeholders for control tokens."""
    placeholders = placeholders or Placeholders(tokenizer)
    written = placeholders.spelled
    marks = Marks(
        written(style.opening),
        tuple(map(written, style.closing)),
        tuple(map(written, style.headers)),
        tuple(map(written, style.trailers)),
        style.anywhere,
    )
    return Spelling(marks, placeholders.characters, placeholders.texts)


class AnswerReader(Protocol):
    """Finds tool calls in the text of an answer."""

    @property
    def placeholders(self) -> Mapping[int, str]: ...

    @property
    def complete(self) -> int: ...

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]: ...

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]: ...


class ThinkingDecoder:
    """A decoder for one answer, fed token by token. Stop strings apply to the answer, not to thinking.

    spelling   the spelling of the model's tags; None if the model has no tags, so that all text belongs to the answer
    opened     True if the prompt ends inside a thinking block
    may_close  True if a closing tag may end thinking that was never opened; see ThinkingSplitter
    reader     finds tool calls in the answer; None if there are none. It uses the same placeholders as `spelling`
    """

    def __init__(
        self,
        stop: tuple[str, ...],
        spelling: Spelling | None = None,
        *,
        opened: bool = False,
        may_close: bool = True,
        reader: AnswerReader | None = None,
    ) -> None:
        self._answer = StreamingDecoder(stop)
        self._spelling = spelling
        self._reader = reader
        self._placeholders = spelling.placeholders if spelling else reader.placeholders if reader else {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._splitter = ThinkingSplitter(spelling.marks, opened=opened, may_close=may_close) if spelling else None

    @property
    def finds_calls(self) -> bool:
        """True if the answer may contain tool calls."""
        return self._reader is not None

    @property
    def has_calls(self) -> bool:
        """True if a tool call is complete."""
        return self._reader is not None and self._reader.complete > 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._answer.stopped_by

    @property
    def thinking(self) -> bool:
        """True while the model is thinking."""
        return self._splitter is not None and self._splitter.phase is Phase.THINKING

    @property
    def answering(self) -> bool:
        """True once the answer has started."""
        return self._splitter is None or self._splitter.phase is Phase.ANSWERING

    @property
    def tentative(self) -> bool:
        """True while a later closing tag may still turn the answer so far into thinking."""
        return self._splitter is not None and self._splitter.tentative

    def continues_after(self, token: int) -> bool:
        """Return True if an end-of-generation token ends only the thinking, so that the answer follows."""
        placeholder = self._spelling and self._spelling.placeholders.get(token)
        return self.thinking and self._spelling is not None and placeholder in self._spelling.marks.closing

    @property
    def may_be_closing(self) -> bool:
        """True if the text so far ends with the beginning of a closing tag."""
        return self._splitter is not None and self._splitter.may_be_closing

    @property
    def closing_index(self) -> int:
        """The index among the style's closing tags of the tag that has ended the thinking."""
        if self._splitter is None or self._spelling is None:
            raise ValueError("the model never thinks")
        return self._spelling.marks.closing.index(self._splitter.closed_by)

    @property
    def last_closing_bytes(self) -> frozenset[int]:
        """The last bytes of the closing tags that end with text. Without one of them, no text can end the thinking."""
        marks = () if self._spelling is None else self._spelling.marks.closing
        return frozenset(mark.encode()[-1] for mark in marks if not "\ud800" <= mark[-1] <= "\udfff")

    def disallow_thinking(self) -> None:
        """Treat any further opening tag as part of the answer."""
        if self._splitter is not None:
            self._splitter.disallow_thinking()

    def feed(self, token: int, data: bytes) -> Split:
        """Add a token and its bytes, and return the text that can be shown.

        Do not call `feed` once `stopped_by` is set.
        """
        if self._splitter is None and self._reader is None:
            return Split(answer=self._answer.feed(data))
        placeholder = self._placeholders.get(token)
        text = self._utf8.decode(data) if placeholder is None else self._utf8.decode(b"", True) + placeholder
        return self._read(self._split(text))

    def finish(self) -> Split:
        """End the answer and return the buffered text, up to a stop string if it contains one."""
        if self._splitter is None and self._reader is None:
            return Split(answer=self._answer.finish())
        first = self._read(self._split(self._utf8.decode(b"", True)))
        if self.stopped_by is not None:
            return first
        last = self._read(self._splitter.finish() if self._splitter else Split(), final=True)
        if self.stopped_by is None:
            last.answer += self._answer.finish()
        answer, calls = first.answer + last.answer, first.calls + last.calls
        return Split(first.thought + last.thought, answer, first.unopened, calls)

    def _split(self, text: str) -> Split:
        return Split(answer=text) if self._splitter is None else self._splitter.feed(text)

    def _read(self, split: Split, *, final: bool = False) -> Split:
        """Find tool calls, replace placeholders with the text of their tokens, and cut the answer at a stop string."""
        texts = self._spelling.texts if self._spelling else {}
        if split.unopened:
            split.thought = self._answer.finish() + split.thought
        answer, calls = split.answer.translate(texts), split.calls
        if self._reader is not None:
            answer, calls = self._reader.feed(split.answer)
            if final:
                rest, more = self._reader.finish()
                answer, calls = answer + rest, calls + more
        return replace(
            split,
            thought=split.thought.translate(texts),
            answer=self._answer.feed(answer.encode()) if answer else "",
            calls=calls,
        )
