"""Thinking styles, and the decoder that separates thinking from the answer in the output of a model.

Model families mark their thinking with different tags, so a model's style must be recognized first.
`ModelThinking` in prompts.py recognizes the style, and switches thinking on or off in a prompt.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from llmrun.engine.streaming import StreamingDecoder, first_completed, length_begun

if TYPE_CHECKING:
    from llmrun.engine.requests import ToolCallDelta
    from llmrun.engine.templates.tool_format import ThinkingTags
    from llmrun.engine.tool_calls.text_calls import TextCallDecoder
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer


class ThinkingStyle(Struct, frozen=True):
    """The texts that enclose a model's thinking. Whitespace next to one of these texts counts as part of that text.

    opening   the tag that begins thinking, before the answer has started
    closing   the tags that end thinking; any one of them is enough
    headers   texts that may precede the answer and are not part of it
    trailers  texts that may follow the answer and are not part of it
    known_by  a template that contains all of these texts has this style; () means `opening` and `closing[0]`
    anywhere  True if every message has a header, so that the model may think again after it has started to answer
    ending    the text that the model itself would write to end its thinking and begin the answer
    blank     the text that the model would write between `opening` and `ending` if it did not think
    guessed   True if only the vocabulary suggests this style; in some families, all models have the tags, but few think
    """

    opening: str
    closing: tuple[str, ...]
    headers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()
    known_by: tuple[str, ...] = ()
    anywhere: bool = False
    ending: str = ""
    blank: str = ""
    guessed: bool = False


def pair_style(opening: str, closing: str) -> ThinkingStyle:
    """Return the style with these two tags: a known style, or else a plain pair of tags."""
    return next(
        (style for style in reversed(STYLES) if (style.opening, style.closing[0]) == (opening, closing)),
        ThinkingStyle(opening, (closing,), ending=closing),
    )


_HUNYUAN = ThinkingStyle(
    "<think>",
    ("</think>",),
    headers=("<answer>",),
    trailers=("\n</answer>", "</answer>"),
    known_by=("</think>", "<answer>", "</answer>"),
    ending="\n</think>\n<answer>\n",
    blank="\n",
)

STYLES = (
    # gpt-oss. Messages to tools keep their header, because it names the tool.
    ThinkingStyle(
        "<|channel|>analysis<|message|>",
        ("<|end|>", "<|channel|>final<|message|>"),
        headers=(
            "<|end|>",
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
        ),
        known_by=("<|channel|>analysis", "<|channel|>final"),
        anywhere=True,
        ending="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    ThinkingStyle(
        "<|open|>think<|sep|>",  # Kimi K3
        ("<|close|>think<|sep|>",),
        headers=("<|open|>response<|sep|>",),
        trailers=("<|close|>response<|sep|><|close|>message<|sep|>", "<|close|>response<|sep|>"),
        known_by=("<|open|>", "<|close|>", "<|sep|>", "'think' if thinking else 'response'"),
        ending="<|close|>think<|sep|><|open|>response<|sep|>",
    ),
    ThinkingStyle("<|channel>thought", ("<channel|>",), ending="<channel|>", blank="\n"),  # Gemma 4
    ThinkingStyle(
        "<|START_THINKING|>",  # Cohere
        ("<|END_THINKING|>",),
        headers=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        trailers=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        ending="<|END_THINKING|>",
    ),
    ThinkingStyle("<|inner_prefix|>", ("<|inner_suffix|>",), ending="<|inner_suffix|>"),  # Apertus
    ThinkingStyle(
        "<|think|>",  # Solar
        ("<|end|>",),
        headers=("<|begin|>assistant", "<|content|>"),
        known_by=("<|think|>", "<|content|>", "<|begin|>"),
        ending="<|end|><|begin|>assistant<|content|>",
    ),
    ThinkingStyle("[THINK]", ("[/THINK]",), ending="[/THINK]"),  # Mistral
    ThinkingStyle("<seed:think>", ("</seed:think>",), ending="</seed:think>"),
    ThinkingStyle("<mm:think>", ("</mm:think>",), ending="</mm:think>"),  # MiniMax M3
    ThinkingStyle(
        "<thinking>",  # Apriel 1.5
        ("</thinking>",),
        headers=("[BEGIN FINAL RESPONSE]",),
        trailers=("[END FINAL RESPONSE]",),
        known_by=("<thinking>", "</thinking>", "[BEGIN FINAL RESPONSE]"),
        ending="</thinking>\n[BEGIN FINAL RESPONSE]\n",
    ),
    ThinkingStyle(
        "Here are my reasoning steps:",  # Apriel 1.6
        ("[BEGIN FINAL RESPONSE]",),
        ending="\n[BEGIN FINAL RESPONSE]\n",
    ),
    ThinkingStyle(
        "<think>",  # Granite 3, ERNIE 4.5
        ("</think>",),
        headers=("<response>",),
        trailers=("\n</response>", "</response>"),
        known_by=("<think>", "</think>", "<response>", "</response>"),
        ending="</think>",
    ),
    _HUNYUAN,
    replace(_HUNYUAN, known_by=("</think>", "<|extra_0|>")),  # A13B, whose template does not show the answer's tags
    # Qwen, DeepSeek, SmolLM, GLM, Nemotron, LFM and many others. Some templates contain only the closing tag.
    ThinkingStyle("<think>", ("</think>",), known_by=("</think>",), ending="\n</think>\n\n", blank="\n"),
)


def recognised_style(
    template: str | None,
    tokenizer: Tokenizer,
    known_pair: Sequence[str] | None,
    tried: Callable[[], ThinkingTags | None],
) -> ThinkingStyle | None:
    """Return the style in which a model marks its thinking, or None if there is no thinking or the style is unknown.

    The sources are tried in this order: the texts in the template, the tags found by probing the template (`tried`),
    `known_pair` (the two tags, or () if the model does not think), and pairs of tags that the vocabulary has as tokens.
    """
    for style in STYLES:
        if template and all(text in template for text in style.known_by or (style.opening, style.closing[0])):
            return style
    if template and _MENTIONS_THINKING.search(template) and (tags := tried()):
        return _style_of_tags(tags)
    if known_pair is not None:
        return pair_style(*known_pair) if known_pair else None
    for opening, closing in _PAIRS_OF_TOKENS:
        if _is_token(tokenizer, opening) and _is_token(tokenizer, closing):
            return replace(pair_style(opening, closing), guessed=True)
    return None


def _style_of_tags(tags: ThinkingTags) -> ThinkingStyle:
    return ThinkingStyle(
        tags.opening,
        (tags.closing,),
        headers=(tags.answer_opening,) if tags.answer_opening else (),
        trailers=(tags.answer_closing,) if tags.answer_closing else (),
        ending=tags.closing + tags.answer_opening,
    )


_MENTIONS_THINKING = re.compile(r"think|thought|reason", re.IGNORECASE)
_PAIRS_OF_TOKENS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text, add_special=False, parse_special=True).tolist()
    return len(ids) == 1 and tokenizer.token_text(ids[0]) == text


_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_BETWEEN = "\n\n"  # separates two blocks of thinking, or two parts of the answer


class Phase(Enum):
    """The current part of a model's output."""

    BEGINNING = auto()  # only whitespace so far
    THINKING = auto()
    THOUGHT = auto()  # after thinking, before the first text of the answer
    ANSWERING = auto()


class Split(Struct):
    """A piece of thinking, followed by a piece of the answer.

    `unopened` is True if the answer returned by earlier splits was in fact thinking, because the model closed a
    thinking block that it never opened. `calls` are pieces of tool calls, which decoders find in the answer.
    """

    thought: str = ""
    answer: str = ""
    unopened: bool = False
    calls: tuple[ToolCallDelta, ...] = ()


class ThinkingSplitter:
    """A splitter for streamed text, which returns text as soon as the text is known to be thinking or answer.

    Tags are recognized only in certain places: `opening` before the answer has started, and `closing` during thinking.
    If `may_close` is True and there has been no thinking yet, `closing` is also recognized in the answer, at the
    beginning of a line outside code blocks. Elsewhere, a tag is ordinary text. Whitespace around thinking belongs
    to the tags. Tags are removed from the output; all other text is kept. The result does not depend on how the text
    is chunked.

    marks      the tags as they appear in the text; None if there are none, so that all text belongs to the answer
    opened     True if the prompt ends inside a thinking block
    may_close  True if a closing tag may end thinking that was never opened
    """

    def __init__(self, marks: ThinkingStyle | None, *, opened: bool = False, may_close: bool = True) -> None:
        self._marks = marks or ThinkingStyle("", ())
        self.phase = Phase.ANSWERING if marks is None else Phase.THINKING if opened else Phase.BEGINNING
        self._may_close = may_close and not opened and marks is not None and not marks.anywhere
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
        return self.phase is Phase.THINKING and length_begun(self._held, self._marks.closing) > 0

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
        found = first_completed(self._held, self._marks.closing)
        if found is not None:
            start, mark = found
            self.closed_by = mark
            self._think(self._held[:start].rstrip())
            self._held = self._held[start + len(mark) :]
            self._enter(Phase.THOUGHT)
            return True
        end = len(self._held) - (0 if final else length_begun(self._held, self._marks.closing))
        thought = self._held[:end].rstrip()
        self._think(thought)
        self._held = self._held[len(thought) :]
        return False

    def _answering(self, final: bool) -> bool:
        marks = self._marks
        known = (*self._openings, *marks.headers) if marks.anywhere else marks.closing if self._may_close else ()
        found = first_completed(self._held, known)
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
        end = min([*ends, len(self._held) - length_begun(self._held, (*known, *trailers))])
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


# Inside the splitter, an unpaired surrogate stands for each control token in a tag. Decoded text never contains
# surrogates, so a model that spells out a tag in ordinary tokens does not produce a tag.
_FIRST_PLACEHOLDER = 0xD800


class Spelling(Struct, frozen=True):
    """A style as spelled in a vocabulary.

    marks         the style with control tokens in its tags replaced by single placeholder characters
    placeholders  maps the id of a control token to its placeholder in `marks`
    texts         maps the code point of a placeholder to the token's text
    """

    marks: ThinkingStyle
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
    marks = replace(
        style,
        opening=written(style.opening),
        closing=tuple(map(written, style.closing)),
        headers=tuple(map(written, style.headers)),
        trailers=tuple(map(written, style.trailers)),
    )
    return Spelling(marks, placeholders.characters, placeholders.texts)


class AnswerReader(Protocol):
    """Finds tool calls in the text of an answer."""

    @property
    def placeholders(self) -> Mapping[int, str]: ...

    @property
    def complete(self) -> int: ...

    @property
    def text_call(self) -> TextCallDecoder | None: ...

    def add(self, calls: Iterable[tuple[str, str]]) -> tuple[ToolCallDelta, ...]: ...

    def feed(self, text: str) -> list[str | ToolCallDelta]: ...

    def finish(self) -> list[str | ToolCallDelta]: ...


class ThinkingDecoder:
    """A decoder for one answer, fed token by token. Stop strings apply to the answer, not to thinking.

    splitter   separates the thinking from the answer
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
        marks = spelling.marks if spelling else None
        self._answer = StreamingDecoder(stop)
        self._closing = marks.closing if marks else ()
        self._texts = spelling.texts if spelling else {}
        self._reader = reader
        self._text_call = reader.text_call if reader else None
        self._placeholders = spelling.placeholders if spelling else reader.placeholders if reader else {}
        self._has_tags = spelling is not None or reader is not None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.splitter = ThinkingSplitter(marks, opened=opened, may_close=may_close)

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
        return self.splitter.phase is Phase.THINKING

    @property
    def answering(self) -> bool:
        """True once the answer has started."""
        return self.splitter.phase is Phase.ANSWERING

    def continues_after(self, token: int) -> bool:
        """Return True if an end-of-generation token ends only the thinking, so that the answer follows."""
        return self.thinking and self._placeholders.get(token) in self._closing

    @property
    def closing_index(self) -> int:
        """The index of the closing tag that has ended the thinking, among the closing tags of the style."""
        return self._closing.index(self.splitter.closed_by)

    @property
    def last_closing_bytes(self) -> frozenset[int]:
        """The last bytes of the closing tags that end with text. Text without these bytes cannot end the thinking."""
        return frozenset(mark.encode()[-1] for mark in self._closing if not "\ud800" <= mark[-1] <= "\udfff")

    def feed(self, token: int, data: bytes) -> Split:
        """Add a token and its bytes, and return the text that can be shown.

        Do not call `feed` once `stopped_by` is set.
        """
        if not self._has_tags:
            return Split(answer=self._answer.feed(data))
        placeholder = self._placeholders.get(token)
        text = self._utf8.decode(data) if placeholder is None else self._utf8.decode(b"", True) + placeholder
        return self._without_possible_call(self._read(self.splitter.feed(text)))

    def finish(self) -> Split:
        """End an answer that the model has completed, and return the buffered text, up to a stop string in it.

        If the whole answer consists of tool calls in plain JSON, return the calls instead of the text.
        """
        rest = self._rest()
        if self._reader and self._text_call and self.stopped_by is None and (calls := self._text_call.finish()):
            return replace(rest, calls=self._reader.add(calls))
        return self._with_held_text(rest)

    def cut(self) -> Split:
        """End an answer that was cut off, and return the buffered text, up to a stop string in it."""
        return self._with_held_text(self._rest())

    def _without_possible_call(self, split: Split) -> Split:
        """Hold the answer back while it may consist of tool calls in plain JSON."""
        if self._text_call is None:
            return split
        split = replace(split, answer=self._text_call.feed(split.answer))
        return self._with_held_text(split) if split.calls or self.stopped_by is not None else split

    def _with_held_text(self, split: Split) -> Split:
        """Add the text that was held back, because the text is not a call."""
        text_call = self._text_call
        return split if text_call is None else replace(split, answer=split.answer + text_call.release())

    def _rest(self) -> Split:
        """Return the buffered text at the end of the answer."""
        if not self._has_tags:
            return Split(answer=self._answer.finish())
        first = self._read(self.splitter.feed(self._utf8.decode(b"", True)))
        if self.stopped_by is not None:
            return self._without_possible_call(first)
        last = self._read(self.splitter.finish(), final=True)
        if self.stopped_by is None:
            last.answer += self._answer.finish()
        answer, calls = first.answer + last.answer, first.calls + last.calls
        return self._without_possible_call(Split(first.thought + last.thought, answer, first.unopened, calls))

    def _read(self, split: Split, *, final: bool = False) -> Split:
        """Find tool calls, replace placeholders with the text of their tokens, and cut the answer at a stop string."""
        if split.unopened:
            split.thought = self._answer.finish() + split.thought
        answer, calls = split.answer.translate(self._texts), split.calls
        if self._reader is not None:
            found = self._reader.feed(split.answer) + (self._reader.finish() if final else [])
            answer = "".join(each for each in found if isinstance(each, str))
            calls = tuple(each for each in found if not isinstance(each, str))
        return replace(
            split,
            thought=split.thought.translate(self._texts),
            answer=self._answer.feed(answer.encode()) if answer else "",
            calls=calls,
        )


class Beginning(Struct, frozen=True):
    """The text of a prompt and the initial state of its answer.

    opened     True if the prompt ends inside a thinking block
    may_close  True if the answer may begin with thinking that no tag opens
    """

    text: str
    opened: bool
    may_close: bool
