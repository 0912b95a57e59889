"""The work of one step: builds its batch, and applies the results to the requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.types import HIDDEN, LOGITS, Batch
from llmrun.engine.adapters import scales_of_rows
from llmrun.engine.answer import Answer
from llmrun.engine.drafting.base import NO_DRAFT, Draft
from llmrun.engine.drafting.costs import StepSize
from llmrun.engine.requests import Event, PrefillProgress
from llmrun.engine.slots import Slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step.

    depth    number of tokens in the slot before the step
    tokens   tokens of the prompt or the answer, which follow those in the slot
    is_last  True if `tokens` are the last ones of the answer so far, so that the step yields the next token
    certain  tokens that will follow them whatever the logits are; only if `is_last`
    draft    predicted tokens that follow `certain`; only if `is_last`
    found    all predicted tokens, of which `draft` are the first ones
    """

    answer: Answer
    slot: Slot
    depth: int
    tokens: list[int]
    is_last: bool
    certain: tuple[int, ...] = ()
    draft: Draft = NO_DRAFT
    found: Draft = NO_DRAFT

    @classmethod
    def next_of(cls, answer: Answer, slot: Slot, most: int) -> Work:
        """Return the next work of a request, with at most `most` rows."""
        depth = len(slot.tokens)
        end = min(depth + most, len(answer.tokens))
        if end < len(answer.tokens):
            return cls(answer, slot, depth, answer.tokens[depth:end], is_last=False)
        n_certain = min(depth + most, answer.limit - 1) - end
        certain = tuple(itertools.islice(answer.forced, max(n_certain, 0)))
        return cls(answer, slot, depth, answer.tokens[depth:end], is_last=True, certain=certain)

    @property
    def decodes(self) -> bool:
        """True if only tokens of the answer are run, as in every step after the prompt."""
        return self.is_last and len(self.tokens) == 1

    @property
    def rows(self) -> int:
        """The number of rows in the step."""
        return len(self.tokens) + len(self.certain) + len(self.draft.tokens)

    @property
    def end(self) -> int:
        """The number of tokens in the slot after the step."""
        return self.depth + self.rows

    @property
    def described(self) -> int:
        """The number of rows whose logits are needed only for the log-probabilities of certain tokens."""
        return len(self.certain) if self.answer.request.logprobs is not None else 0

    @property
    def wanted(self) -> int:
        """The number of rows whose logits are needed, which are the last rows.

        Besides the described ones, they are the row of the last token that is certain and the rows of the draft.
        """
        return self.described + 1 + len(self.draft.tokens) if self.is_last else 0

    @property
    def takes_hidden(self) -> bool:
        """True if the hidden states of all rows are needed."""
        return any(drafter.takes_hidden for drafter in self.answer.drafters)


def batch_of(work: Sequence[Work]) -> Batch:
    """Build the batch of a step."""
    tokens: list[int] = []
    seq: list[int] = []
    pos: list[int] = []
    want: list[int] = []
    for part in work:
        tokens += [*part.tokens, *part.certain, *part.draft.tokens]
        seq += [part.slot.index] * part.rows
        pos += range(part.depth, part.depth + part.rows)
        hidden = HIDDEN if part.takes_hidden else 0
        want += [hidden] * (part.rows - part.wanted) + [LOGITS | hidden] * part.wanted
    return Batch(
        *(np.array(tokens, np.int32), np.array(seq, np.int32), np.array(pos, np.int32), np.array(want, np.uint8)),
        scales=scales_of_rows([(part.answer.adapters, part.depth, part.end) for part in work]),
    )


def take_results(
    sampler: Sampler, work: Sequence[Work], logits: NDArray[np.float32]
) -> Iterator[tuple[Work, list[Event], list[int]]]:
    """Update the requests and slots of a step that has been run, given the logits of its wanted rows.

    Yields each request's part of the step with its events and the tokens that were drawn for it. Afterwards, a slot
    contains all rows of the step, including those of wrong drafts.
    """
    ends = itertools.accumulate(part.wanted for part in work)
    wanted = [logits[end - part.wanted : end] for part, end in zip(work, ends, strict=True)]
    events = [_add_known(part, rows[: part.described]) for part, rows in zip(work, wanted, strict=True)]
    undecided = [rows[part.described :] for part, rows in zip(work, wanted, strict=True)]
    sequences = [part.answer.rows_to_draw(rows, part.draft.tokens) for part, rows in zip(work, undecided, strict=True)]
    results = zip(work, events, undecided, sampler.sample_rows(sequences), strict=True)
    for part, new_events, rows, drawn in results:
        known = len(part.answer.tokens)
        if part.is_last:
            new_events += part.answer.accept(rows, part.draft.tokens, drawn)
        yield part, new_events, part.answer.tokens[known:]


def _add_known(part: Work, logits: NDArray[np.float32]) -> list[Event]:
    """Update a request and its slot with the tokens of its rows and return the request's events."""
    answer, slot = part.answer, part.slot
    slot.tokens += answer.cached_from(part.tokens, part.depth)
    events: list[Event] = []
    if answer.in_prefill:
        events.append(PrefillProgress(answer.request_id, len(slot.tokens), answer.prompt_tokens))
    if part.is_last:
        events += answer.add_certain(logits, part.certain)
        slot.tokens += answer.cached_from([*part.certain, *part.draft.tokens], len(slot.tokens))
    return events


def size_of(work: Sequence[Work]) -> StepSize:
    """Return the size of a step."""
    rows = cached = attended = 0
    for part in work:
        rows += part.rows
        cached += part.depth
        attended += part.rows * part.depth
    return StepSize(len(work), rows, cached, attended)
