"""The work of one step: selects the tokens to run, builds their batch, and draws the next tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.answer import Answer
from llmrun.engine.drafting.base import NO_DRAFT, Draft
from llmrun.engine.sampler import Drawn, Sampler
from llmrun.engine.slots import Slot
from llmrun.types import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step.

    depth    number of tokens in the slot before the step
    tokens   tokens of the prompt or the answer, which follow those in the slot
    is_last  True if `tokens` are the last known ones, so that the step yields the next token
    draft    predicted tokens that follow them; only if `is_last`
    found    all predicted tokens, of which `draft` are the first ones
    """

    answer: Answer
    slot: Slot
    depth: int
    tokens: list[int]
    is_last: bool
    draft: Draft = NO_DRAFT
    found: Draft = NO_DRAFT

    @classmethod
    def next_of(cls, answer: Answer, slot: Slot, most: int) -> Work:
        """Return the next work of a request, with at most `most` tokens."""
        depth = len(slot.tokens)
        end = min(depth + most, len(answer.tokens))
        return cls(answer, slot, depth, answer.tokens[depth:end], end == len(answer.tokens))

    @property
    def decodes(self) -> bool:
        """True if only the last known token and a draft are run, as in every step after the prompt."""
        return self.is_last and len(self.tokens) == 1

    @property
    def rows(self) -> int:
        """The number of rows in the step."""
        return len(self.tokens) + len(self.draft.tokens)

    @property
    def wanted(self) -> int:
        """The number of rows whose logits are needed: those of the last known token and of the draft."""
        return 1 + len(self.draft.tokens) if self.is_last else 0


def batch_of(work: Sequence[Work]) -> Batch:
    """Build the batch of a step."""
    tokens: list[int] = []
    seq: list[int] = []
    pos: list[int] = []
    want: list[bool] = []
    for part in work:
        tokens += [*part.tokens, *part.draft.tokens]
        seq += [part.slot.index] * part.rows
        pos += range(part.depth, part.depth + part.rows)
        want += [False] * (part.rows - part.wanted) + [True] * part.wanted
    return Batch(np.array(tokens, np.int32), np.array(seq, np.int32), np.array(pos, np.int32), np.array(want))


def draw(
    sampler: Sampler, work: Sequence[Work], logits: NDArray[np.float32]
) -> Iterator[tuple[Work, NDArray[np.float32], Drawn]]:
    """Draw the next tokens of all answers of a step, given the logits of its wanted rows.

    Yields each request's part of the step with its rows of logits and its draws.
    """
    ends = itertools.accumulate(part.wanted for part in work)
    rows = [logits[end - part.wanted : end] for part, end in zip(work, ends, strict=True)]
    sequences = [part.answer.rows_to_draw(wanted, part.draft.tokens) for part, wanted in zip(work, rows, strict=True)]
    return zip(work, rows, sampler.sample_rows(sequences), strict=True)
