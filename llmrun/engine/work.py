"""The work of one step: builds its batch, adds drafts to it, and applies the results to the requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.types import HIDDEN, LOGITS, Batch
from llmrun.engine.adapters import scales_of_rows
from llmrun.engine.answer import Answer
from llmrun.engine.costs import StepCosts, StepSize
from llmrun.engine.drafting.base import LONGEST_DRAFT, NO_DRAFT, Draft, Drafter, DraftSource, Kind
from llmrun.engine.drafting.pace import Acceptance, AnswerPace, StepPlan
from llmrun.engine.requests import Event, PrefillProgress
from llmrun.engine.slots import Slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.requests import Request
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
        np.array(tokens, np.int32),
        np.array(seq, np.int32),
        np.array(pos, np.int32),
        np.array(want, np.uint8),
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


_LEAST_DRAWN: Final = 2  # tokens to draw after forced ones before drafts resume


class Speculation:
    """Drafts tokens for the steps of an engine, and keeps the statistics that decide how many.

    sources  the sources of drafts; those whose drafts take no time come first
    costs    tells how long steps take
    """

    def __init__(self, sources: Sequence[DraftSource], costs: StepCosts) -> None:
        self._sources = sources
        expected: dict[Kind, float] = {}
        for source in sources:
            expected |= source.expected
        self._costs = costs
        self._acceptance = Acceptance(expected.__getitem__)
        self._plan: StepPlan | None = None  # the plan of the step that is running
        self._stopped = not sources

    @property
    def error(self) -> str:
        """Why a source no longer drafts anything, or an empty string."""
        return next((source.error for source in self._sources if source.error), "")

    def begin(self, request: Request) -> tuple[Sequence[Drafter], AnswerPace]:
        """Return the drafters of a new answer, and the pace that decides how long its drafts are."""
        return [source.drafter(request) for source in self._sources], AnswerPace(self._acceptance.rate)

    def with_drafts(self, work: Sequence[Work], room: int) -> list[Work]:
        """Add drafts with at most `room` rows in total to a step that has one row for each of its answers."""
        if self._stopped or not work or not self._costs.known:
            return list(work)
        self._plan = plan = self._new_plan(size_of(work))
        drafted = []
        for part in work:
            most = min(LONGEST_DRAFT, room, part.answer.limit - len(part.answer.tokens) - 1)
            drafted.append(_with_draft(part, plan, most) if most > 0 else part)
            room -= len(drafted[-1].draft.tokens)
        return drafted

    def _new_plan(self, size: StepSize) -> StepPlan:
        return StepPlan(self._costs, size)

    def observe_step(self, work: Sequence[Work], seconds: float) -> None:
        """Record the duration of a step in which every row belonged to an answer in progress."""
        if self._stopped:
            return
        n_drafted = max(1, sum(len(part.draft.tokens) for part in work))
        for part in work:
            draft = part.draft
            if self._plan is not None and (draft.tokens or draft.seconds):
                part.answer.pace.observe_loss(self._plan.loss(draft, len(draft.tokens) / n_drafted, seconds))

    def observe_hidden(self, work: Sequence[Work], hidden: NDArray[np.float32]) -> None:
        """Pass the hidden states of a step to the drafters that take them. Call this before the answers change."""
        first = 0
        for part in work:
            if not part.takes_hidden:
                continue
            rows = hidden[first : first + part.rows]
            first += part.rows
            for drafter in part.answer.drafters:
                drafter.observe_hidden(part.answer.tokens, part.depth, rows)

    def observe_draft(self, part: Work, accepted: Sequence[int]) -> None:
        """Record how much of a draft was right. `accepted` are the tokens that the step added after `certain`.

        The first token that was found but not run is compared too, so even steps without drafts show how often drafts
        would be right.
        """
        found, pace, n_run = part.found, part.answer.pace, len(part.draft.tokens)
        most = n_right = min(len(found.tokens), len(accepted))
        if found.tokens[:most] != tuple(accepted[:most]):
            n_right = next(i for i in range(most) if found.tokens[i] != accepted[i])
        pace.observe_tokens(len(accepted), min(n_right, n_run), max(n_right - n_run, 0))
        if most:
            for acceptance in (self._acceptance, pace.acceptance):
                acceptance.observe(found, n_right, found_wrong=n_right < most)

    def stop(self) -> None:
        """Stop drafting for good."""
        self._stopped = True

    def cancel(self) -> None:
        """Stop a running draft. Signal handlers may call this."""
        for source in self._sources:
            source.cancel()

    def release(self, answer: Answer) -> None:
        """Free the resources of an answer's drafters, because it was dropped or has to wait."""
        for drafter in answer.drafters:
            drafter.release()

    def finish(self, answer: Answer) -> None:
        """Remember a finished answer, and free the resources of its drafters."""
        for source in self._sources:
            source.learn(answer.tokens[answer.prompt_tokens :])
        self.release(answer)

    def forget(self) -> None:
        """Forget all finished answers."""
        for source in self._sources:
            source.forget()

    def close(self) -> None:
        """Close the sources."""
        for source in self._sources:
            source.close()


def _with_draft(part: Work, plan: StepPlan, most: int) -> Work:
    """Return the part with its best draft of at most `most` tokens, shortened to those worth running."""
    pace, depth = part.answer.pace, part.depth
    found = _found(part, plan, most)
    if not found.tokens and not found.seconds:
        return part
    length, _ = plan.best_length(found.kinds, pace, depth)
    run = found.first(length)
    plan.add(run, pace, depth)
    return replace(part, draft=run, found=found)


def _found(part: Work, plan: StepPlan, most: int) -> Draft:
    """Return the best draft of at most `most` tokens.

    The format makes forced tokens resemble earlier text, so the resemblance does not predict the next token. Therefore,
    drafts resume only after `_LEAST_DRAWN` tokens have been drawn. A draft model is asked only if its draft will
    probably be better than the best so far, or to measure it again.
    """
    answer, depth = part.answer, part.depth
    best, pace = NO_DRAFT, answer.pace
    if answer.forced or (answer.forced_tokens and answer.drawn_in_a_row < _LEAST_DRAWN):
        return best
    for drafter in answer.drafters:
        if drafter.token_seconds:
            _, speed = plan.best_length(best.kinds, pace, depth)
            if not plan.may_ask(drafter, pace) and not plan.promises(drafter, speed, pace, depth):
                continue
            pace.unasked = 0
        found = drafter.draft(answer.tokens, most, partial(plan.worth, drafter, pace, depth)).first(most)
        plan.spend(found.seconds)
        best = _better(best, found, plan, pace, depth)
    return best.first(answer.n_allowed(best.tokens))


def _better(one: Draft, other: Draft, plan: StepPlan, pace: AnswerPace, depth: int) -> Draft:
    """Return the draft that is expected to give more tokens per second. Its time is that of both drafts."""
    if not one.tokens:
        return other
    (_, one_speed), (_, other_speed) = (plan.best_length(draft.kinds, pace, depth) for draft in (one, other))
    return replace(other if other_speed > one_speed else one, seconds=one.seconds + other.seconds)
