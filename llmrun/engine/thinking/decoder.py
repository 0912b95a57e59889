"""The tokens of one answer become text: what is thought and what is answered, each as soon as it is certain."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrun.engine.streaming import StreamingDecoder
from llmrun.engine.thinking.splitter import Marks, Phase, Split, ThinkingSplitter

if TYPE_CHECKING:
    from llmrun.engine.thinking.styles import ThinkingStyle
    from llmrun.tokenizers.base import Tokenizer

# No decoded text holds half a surrogate pair. So a control token is one of these on its way through the splitter, and
# a model that spells a mark letter by letter does not make one of it.
_FIRST_STAND_IN = 0xD800


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a style's marks are written in a vocabulary.

    stand_ins  control token -> the one character it is in `marks`
    texts      that character's code -> the token's own text
    """

    marks: Marks
    stand_ins: dict[int, str]
    texts: dict[int, str]


def spelled(style: ThinkingStyle, tokenizer: Tokenizer) -> Spelling:
    """The marks of a style, with stand-ins for what are control tokens of this vocabulary."""
    stand_ins: dict[int, str] = {}
    texts: dict[int, str] = {}

    def written(mark: str) -> str:
        text = ""
        for token in tokenizer.encode(mark, add_special=False, parse_special=True).tolist():
            name = tokenizer.token_text(token)
            if tokenizer.token_bytes(token) or not name or (at := mark.find(name)) < 0:
                continue
            character = stand_ins.setdefault(token, chr(_FIRST_STAND_IN + len(stand_ins)))
            texts[ord(character)] = name
            text += mark[:at] + character
            mark = mark[at + len(name) :]
        return text + mark

    marks = Marks(
        written(style.opening),
        tuple(map(written, style.closing)),
        tuple(map(written, style.headers)),
        tuple(map(written, style.trailers)),
        style.anywhere,
    )
    return Spelling(marks, stand_ins, texts)


class ThinkingDecoder:
    """Decodes one answer token by token. Stop strings end the answer, and are not looked for in thinking.

    spelling   of the model's marks; None: it has none, and all is answer
    opened     the prompt has begun the thinking
    may_close  thinking that was never opened may be closed: see ThinkingSplitter
    """

    def __init__(
        self, stop: tuple[str, ...], spelling: Spelling | None = None, *, opened: bool = False, may_close: bool = True
    ) -> None:
        self._answer = StreamingDecoder(stop)
        self._spelling = spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._splitter = ThinkingSplitter(spelling.marks, opened=opened, may_close=may_close) if spelling else None

    @property
    def stopped_by(self) -> str | None:
        return self._answer.stopped_by

    @property
    def thinking(self) -> bool:
        return self._splitter is not None and self._splitter.phase is Phase.THINKING

    @property
    def answering(self) -> bool:
        """Text of the answer has come."""
        return self._splitter is None or self._splitter.phase is Phase.ANSWERING

    @property
    def tentative(self) -> bool:
        """The answer so far may turn out to have been thinking."""
        return self._splitter is not None and self._splitter.tentative

    def goes_on_after(self, token: int) -> bool:
        """Whether a token that ends an answer elsewhere only ends the thinking here."""
        stand_in = self._spelling and self._spelling.stand_ins.get(token)
        return self.thinking and self._spelling is not None and stand_in in self._spelling.marks.closing

    @property
    def may_be_closing(self) -> bool:
        return self._splitter is not None and self._splitter.may_be_closing

    def think_no_more(self) -> None:
        """From here on a mark that begins thinking is text of the answer."""
        if self._splitter is not None:
            self._splitter.think_no_more()

    def feed(self, token: int, data: bytes) -> Split:
        """Take a token and its bytes; return the text now certain. Nothing may be fed once `stopped_by` is set."""
        if self._splitter is None or self._spelling is None:
            return Split(answer=self._answer.feed(data))
        stand_in = self._spelling.stand_ins.get(token)
        text = self._utf8.decode(data) if stand_in is None else self._utf8.decode(b"", True) + stand_in
        return self._read(self._splitter.feed(text), self._spelling)

    def finish(self) -> Split:
        """The answer is over: what is still held, unless it completes a stop string."""
        if self._splitter is None or self._spelling is None:
            return Split(answer=self._answer.finish())
        first = self._read(self._splitter.feed(self._utf8.decode(b"", True)), self._spelling)
        if self.stopped_by is not None:
            return first
        last = self._read(self._splitter.finish(), self._spelling)
        if self.stopped_by is None:
            last.answer += self._answer.finish()
        return Split(first.thought + last.thought, first.answer + last.answer, first.unopened)

    def _read(self, split: Split, spelling: Spelling) -> Split:
        """The split in the words that the tokens stand for, its answer up to a stop string."""
        if split.unopened:
            split.thought = self._answer.finish() + split.thought
        answer = split.answer.translate(spelling.texts)
        return replace(
            split,
            thought=split.thought.translate(spelling.texts),
            answer=self._answer.feed(answer.encode()) if answer else "",
        )
