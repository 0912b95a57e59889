"""Applies a constraint to one answer, starting where the answer begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from llmrun.formats.layouts.tokens import mask_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.constraint.matcher import Constraint
    from llmrun.engine.thinking import Beginning, ThinkingDecoder, ThinkingStyle
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

    Masks = NDArray[np.uint32]

_ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Prelude:
    """The tags that the model may write before the answer, as tokens.

    opening   the tag that begins thinking; () if the model must not think
    headers   the headers that may precede the answer
    required  True if a header must precede the answer
    endings   for each of the style's closing tags, the tokens that the model would write between it and the answer
    """

    opening: Sequence[int] = ()
    headers: Sequence[Sequence[int]] = ()
    required: bool = False
    endings: Sequence[Sequence[int]] = ()


NO_PRELUDE = Prelude()


def prelude_of(
    style: ThinkingStyle,
    beginning: Beginning,
    think: bool | None,
    encode: Callable[[str], Sequence[int]],
    *,
    calls: bool,
) -> Prelude:
    """Return the prelude of an answer.

    think   True if the request enables thinking, False if the request disables thinking
    encode  a function that turns the text of a tag into tokens
    calls   True if the answer may consist of tool calls, which some styles write without a header
    """
    may_open = beginning.may_close and not beginning.opened and think is not False
    headers, ending = style.headers, style.ending
    if style.anywhere:  # other headers begin messages that are not the answer
        headers = tuple(tag for tag in style.headers if ending.endswith(tag))
        if calls:
            ending = ending.removesuffix(headers[0])
    return Prelude(
        encode(style.opening) if may_open else (),
        [encode(header) for header in headers],
        style.anywhere and may_open and not calls,
        [encode(ending.rpartition(tag)[2]) if tag in ending else () for tag in style.closing],
    )


class _Stage(Enum):
    PRELUDE = auto()  # the answer may begin, or a tag may precede it
    THINKING = auto()
    ENDING = auto()  # the tokens between the thinking and the answer are being forced
    ANSWER = auto()


class AnswerConstraint:
    """The constraint of one answer, which also tracks the tags and the thinking before the answer.

    During thinking, all tokens are allowed except those that would end the answer. Before the answer, the next token
    begins the answer or continues a tag. Methods raise LlmrunError if a limit of the constraint is exceeded.
    """

    def __init__(
        self, constraint: Constraint, decoder: ThinkingDecoder, tokenizer: Tokenizer, prelude: Prelude = NO_PRELUDE
    ) -> None:
        self._constraint = constraint
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._prelude = prelude
        # Constraints add an end-of-generation token to a vocabulary that contains none (matcher.py).
        self._words = mask_words(tokenizer.vocabulary_size + (not tokenizer.end_of_generation))
        self._stage = _Stage.THINKING
        if not decoder.thinking:
            self._await_answer([prelude.opening, *prelude.headers])
        self._required = prelude.required
        self._n_ending = 0  # number of tokens left in the stage ENDING

    def begin(self, text: str) -> bool:
        """Accept a given beginning of the answer. Returns False if no answer in the format continues this beginning."""
        tokens = self._tokenizer.encode_continuation(text).tolist()
        if self._constraint.n_allowed(tokens) < len(tokens):
            return False
        for token in tokens:
            self._constraint.take(token)
        return not self._constraint.is_complete

    @property
    def is_complete(self) -> bool:
        """True if the answer has the required format and nothing may follow."""
        return self._stage is _Stage.ANSWER and self._constraint.is_complete

    def forced_first(self) -> Sequence[int]:
        """Return the tokens with which the answer must begin."""
        return self._constraint.forced() if self._stage is _Stage.ANSWER else ()

    def is_completed_by(self, tokens: Sequence[int]) -> bool:
        """Return True if the given tokens, which must be valid continuations, complete the answer."""
        if self._stage is not _Stage.ANSWER:
            return False
        for token in tokens:
            self._constraint.take(token)
        complete = self._constraint.is_complete
        self._constraint.back(len(tokens))
        return complete

    def masks(self, draft: Sequence[int]) -> Masks:
        """Return the masks of the next token and of the tokens after each draft token.

        The result is uint32[1 + len(draft), mask_words]. All draft tokens are allowed (see `n_allowed`).
        """
        masks = np.zeros((1 + len(draft), self._words), np.uint32)
        if self._stage is _Stage.ANSWER:
            for mask, token in zip(masks, draft, strict=False):
                self._constraint.allowed(mask)
                self._constraint.take(token)
            if not self._constraint.is_complete:  # otherwise, the answer ends with the draft
                self._constraint.allowed(masks[-1])
            self._constraint.back(len(draft))
        elif self._stage is _Stage.PRELUDE:
            self._allow_answer_and_tags(masks[0])
        else:
            masks[:] = self._mask_of_thinking()
        return masks

    def n_allowed(self, draft: Sequence[int]) -> int:
        """Return the number of leading tokens of a draft that are allowed.

        A draft also ends where the thinking may end, because other tokens are allowed afterwards. A draft never ends
        the answer, because llguidance cannot roll back an end-of-generation token.
        """
        if self._stage is _Stage.ANSWER:
            ends = self._tokenizer.end_of_generation
            return self._constraint.n_allowed(list(takewhile(lambda token: token not in ends, draft)))
        if self._stage is _Stage.THINKING:
            return next((i for i, token in enumerate(draft) if self._may_end_thinking(token)), len(draft))
        return 0

    def take(self, token: int, n_forced: int) -> Sequence[int]:
        """Advance past a new token, which the decoder has already seen, and return the tokens that must come next.

        n_forced  number of tokens that the caller will force next; unless `n_forced` is 0, the result is empty
        """
        if self._stage is _Stage.THINKING:
            if self._decoder.thinking:
                return ()
            ending = () if n_forced else self._prelude.endings[self._decoder.closing_index]
            self._end_thinking(n_forced or len(ending))
            if ending:
                return ending
        elif self._stage is _Stage.ENDING:
            self._end_thinking(self._n_ending - 1)
        elif self._stage is _Stage.PRELUDE:
            self._take_before_answer(token)
        else:
            self._constraint.take(token)
        return self._constraint.forced() if self._stage is _Stage.ANSWER and not n_forced else ()

    # --- thinking

    def _mask_of_thinking(self) -> Masks:
        mask = np.full(self._words, _ALL, np.uint32)
        for token in self._tokenizer.end_of_generation:
            if not self._decoder.continues_after(token):
                mask[token // 32] &= ~np.uint32(1 << token % 32)
        return mask

    def _may_end_thinking(self, token: int) -> bool:
        text = self._tokenizer.token_bytes(token)
        return not text or any(last in text for last in self._decoder.last_closing_bytes)

    def _end_thinking(self, n_ending: int) -> None:
        """End the thinking; `n_ending` forced tokens will come before the answer."""
        self._n_ending = n_ending
        if n_ending:
            self._stage = _Stage.ENDING
        elif self._stage is _Stage.ENDING:
            self._stage = _Stage.ANSWER
        else:
            self._required = False
            self._await_answer(self._prelude.headers)

    # --- the tokens before the answer

    def _await_answer(self, tags: Sequence[Sequence[int]]) -> None:
        self._tags = [list(tag) for tag in tags if tag]
        self._written: list[int] = []  # tokens since the last tag
        self._taken = 0  # number of `_written` tokens passed to the constraint, because they may begin the answer
        self._stage = _Stage.PRELUDE if self._tags else _Stage.ANSWER

    def _allow_answer_and_tags(self, mask: Masks) -> None:
        if self._taken == len(self._written) and not self._required:
            self._constraint.allowed(mask)
        for tag in self._tags:
            if tag[: len(self._written)] == self._written:
                token = tag[len(self._written)]
                mask[token // 32] |= np.uint32(1 << token % 32)

    def _take_before_answer(self, token: int) -> None:
        may_be_answer = self._taken == len(self._written) and not self._required
        self._written.append(token)
        tags = [tag for tag in self._tags if tag[: len(self._written)] == self._written]
        if may_be_answer and self._constraint.n_allowed([token]):
            self._constraint.take(token)
            self._taken += 1
        if self._written in tags:
            self._constraint.back(self._taken)
            is_header = self._written != [*self._prelude.opening]
            self._await_answer([*self._tags])
            if self._decoder.thinking:
                self._stage = _Stage.THINKING
            elif is_header and self._required:
                self._stage = _Stage.ANSWER
        elif not tags:
            self._stage = _Stage.ANSWER
