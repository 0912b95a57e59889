"""Chooses the tokens that each running request runs in the next step, builds its batch, and applies the results.

A request whose prompt shares a prefix with a running request's prompt waits until the running request has computed the
prefix, and then copies it. Otherwise, eight samples of a prompt of 1,000 tokens would compute 8,000 rows.

A request is admitted, and grows, only as long as all running requests can still reach their limits one after the other:
the request that needs the fewest blocks first, then the next request, which can also use the blocks of the first one,
and so on. The method is the banker's algorithm (Dijkstra, EWD 108) for a single resource. Requests that have to pause
lose nothing but time, so no request fails or is computed twice for lack of room.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from llmrun.backends.base import ROWS_PER_ANSWER
from llmrun.base.types import HIDDEN, IMAGE_ROW, LOGITS, Batch
from llmrun.engine.adapters import scales_of_rows
from llmrun.engine.answer import Answer, PrefixWait
from llmrun.engine.costs import EFFICIENT_ROWS, EMPTY, MOST_ROWS, StepCosts, StepSize
from llmrun.engine.drafting.base import LONGEST_DRAFT, NO_DRAFT, Draft, Drafter, DraftSource, Kind
from llmrun.engine.drafting.pace import Acceptance, AnswerPace, StepPlan
from llmrun.engine.requests import Event, PrefillProgress
from llmrun.engine.scheduling.fairness import prompt_order
from llmrun.engine.slots import Slot, common_prefix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import KVCache
    from llmrun.engine.requests import Request
    from llmrun.engine.sampler import Sampler


class Work(Struct, frozen=True):
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
        """Return the next work of a request, with at most `most` rows, or more for an image that must stay whole."""
        depth = len(slot.tokens)
        end = min(depth + most, len(answer.tokens))
        if answer.images is not None:
            end = answer.images.step_end(depth, end)
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
    def described_prompt(self) -> int:
        """The number of rows whose logits are needed only for the log-probabilities of the prompt's tokens."""
        return self.answer.rows_to_describe(self.depth, self.depth + len(self.tokens))

    @property
    def described(self) -> int:
        """The number of rows whose logits are needed only for the log-probabilities of certain tokens."""
        return len(self.certain) if self.answer.request.logprobs is not None else 0

    @property
    def wanted(self) -> int:
        """The number of rows at the end whose logits are needed.

        These rows are the `described_prompt` rows and, in a step that yields a token, the `described` rows, the row of
        the last certain token, and the rows of the draft.
        """
        return self.described_prompt + (self.described + 1 + len(self.draft.tokens) if self.is_last else 0)

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
    batch = Batch(
        np.array(tokens, np.int32),
        np.array(seq, np.int32),
        np.array(pos, np.int32),
        np.array(want, np.uint8),
        scales=scales_of_rows([(part.answer.adapters, part.depth, part.end) for part in work]),
    )
    if any(part.answer.images is not None for part in work):
        from llmrun.engine.image_rows import with_images

        return with_images(batch, [(part.answer.images, part.depth, part.end) for part in work])
    return batch


def take_results(
    sampler: Sampler, work: Sequence[Work], logits: NDArray[np.float32]
) -> Iterator[tuple[Work, list[Event], list[int]]]:
    """Update the requests and slots of a step that has been run, given the logits of its wanted rows.

    Yields each request's part of the step with its events and the tokens that were drawn for it. Afterwards, a slot
    contains all rows of the step, including those of wrong drafts.
    """
    ends = itertools.accumulate(part.wanted for part in work)
    wanted = [logits[end - part.wanted : end] for part, end in zip(work, ends, strict=True)]
    known = [part.described_prompt + part.described for part in work]
    events = [_add_known(part, rows[:n]) for part, rows, n in zip(work, wanted, known, strict=True)]
    undecided = [rows[n:] for rows, n in zip(wanted, known, strict=True)]
    sequences = [part.answer.rows_to_draw(rows, part.draft.tokens) for part, rows in zip(work, undecided, strict=True)]
    results = zip(work, events, undecided, sampler.sample_rows(sequences), strict=True)
    for part, new_events, rows, drawn in results:
        before = len(part.answer.tokens)
        if part.is_last:
            new_events += part.answer.accept(rows, part.draft.tokens, drawn)
        yield part, new_events, part.answer.tokens[before:]


def _add_known(part: Work, logits: NDArray[np.float32]) -> list[Event]:
    """Update a request and its slot with the tokens of its rows, and return the request's events.

    logits  float32[part.described_prompt + part.described, vocabulary]
    """
    answer, slot, n = part.answer, part.slot, part.described_prompt
    slot.tokens += answer.cached_from(part.tokens, part.depth)
    if answer.images is not None:
        answer.images.release(len(slot.tokens))
    events: list[Event] = []
    if answer.in_prefill:
        events.append(_progress(answer, len(slot.tokens)))
        events += answer.echo(logits[:n])
    if part.is_last:
        events += answer.add_certain(logits[n:], part.certain)
        slot.tokens += answer.cached_from([*part.certain, *part.draft.tokens], len(slot.tokens))
    return events


def _progress(answer: Answer, done: int) -> PrefillProgress:
    return PrefillProgress(answer.request_id, done, answer.prompt_tokens, answer.cached_tokens or 0)


def size_of(work: Sequence[Work]) -> StepSize:
    """Return the size of a step."""
    rows = cached = attended = 0
    for part in work:
        rows += part.rows
        cached += part.depth
        attended += part.rows * part.depth
    return StepSize(len(work), rows, cached, attended)


def _prompt_rows(work: Sequence[Work]) -> int:
    return sum(part.rows for part in work if not part.decodes)


_LEAST_DRAWN: Final = 2  # tokens to draw after forced ones before drafts resume


class Speculation:
    """Drafts tokens for the steps of an engine, and keeps the statistics that decide how many tokens to draft.

    sources  the sources of drafts; those whose drafts take no time come first
    costs    predicts how long steps take
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
        """The error that stopped a draft source, or an empty string."""
        return next((source.error for source in self._sources if source.error), "")

    def begin(self, request: Request, image_rows: int = 0) -> tuple[Sequence[Drafter], AnswerPace]:
        """Return the drafters of a new answer, and the pace that decides how long its drafts are.

        image_rows  the number of rows of images in the prompt
        """
        drafters = [source.drafter(request) for source in self._sources]
        for drafter in drafters:
            drafter.image_rows = image_rows
        return drafters, AnswerPace(self._acceptance.rate)

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
        """Pass the hidden states of a step to drafters that need them. Call this method before the answers change."""
        first = 0
        for part in work:
            if not part.takes_hidden:
                continue
            answer, rows, depth = part.answer, hidden[first : first + part.rows], part.depth
            first += part.rows
            if answer.images is not None:
                is_word = [token != IMAGE_ROW for token in answer.tokens[depth : part.end]]
                rows = rows[is_word + [True] * (part.rows - len(is_word))]
                depth -= answer.tokens[:depth].count(IMAGE_ROW)
            for drafter in answer.drafters if len(rows) else ():
                drafter.observe_hidden(answer.words, depth, rows)

    def observe_draft(self, part: Work, accepted: Sequence[int]) -> None:
        """Record how many tokens of a draft were right. `accepted` are the tokens that the step added after `certain`.

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
        """Stop drafting permanently."""
        self._stopped = True

    def cancel(self) -> None:
        """Stop a running draft. Signal handlers may call this method."""
        for source in self._sources:
            source.cancel()

    def release(self, answer: Answer) -> None:
        """Free the resources of the drafters of an answer that was dropped or has to wait."""
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
    """Return the part with its best draft of at most `most` tokens, shortened to the tokens worth running."""
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
    drafts resume only after `_LEAST_DRAWN` tokens have been drawn. A draft model is asked only to measure the model
    again, or if its draft will probably be better than the best draft so far.
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
        found = drafter.draft(answer.words, most, partial(plan.worth, drafter, pace, depth)).first(most)
        plan.spend(found.seconds)
        best = _better(best, found, plan, pace, depth)
    return best.first(answer.n_allowed(best.tokens))


def _better(one: Draft, other: Draft, plan: StepPlan, pace: AnswerPace, depth: int) -> Draft:
    """Return the draft with more expected tokens per second. The result includes the time of both drafts."""
    if not one.tokens:
        return other
    (_, one_speed), (_, other_speed) = (plan.best_length(draft.kinds, pace, depth) for draft in (one, other))
    return replace(other if other_speed > one_speed else one, seconds=one.seconds + other.seconds)


# Waiting can delay a request by a step, which costs about as much as 8 to 16 rows of a prompt.
LEAST_SHARED: Final = 16  # tokens


def wait_for_prefix(answer: Answer, running: Mapping[Answer, Slot], cached: int) -> PrefixWait | None:
    """Return the prefix that a request should wait for, or None if it should start.

    cached  how many of its tokens are in the cache already
    """
    tokens = answer.reusable
    waits = [
        PrefixWait(leader, min(common_prefix(leader.cached_as, tokens), len(tokens) - 1))
        for leader, slot in running.items()
        if leader.prefix_scope == answer.prefix_scope and len(leader.tokens) - len(slot.tokens) > 1
    ]
    longest = max(waits, key=lambda wait: wait.n, default=None)
    return longest if longest and longest.n - cached >= LEAST_SHARED else None


def is_over(wait: PrefixWait, running: Mapping[Answer, Slot]) -> bool:
    """Return whether the leader has computed the prefix, or never will, for example after a cancellation."""
    slot = running.get(wait.leader)
    return slot is None or len(slot.tokens) >= wait.n


def rows_until_copy(leader: Answer, slot: Slot, waiting: Iterable[Answer]) -> int:
    """Return how many rows the leader may run before a waiting request copies its tokens.

    The leader's step must end at the prefix, because a recurrent state can be copied only at its current position.
    """
    ends = [each.wait.n for each in waiting if each.wait is not None and each.wait.leader is leader]
    return min((end for end in ends if end > len(slot.tokens)), default=len(leader.tokens)) - len(slot.tokens)


class Claim(Struct, frozen=True):
    """The blocks that a running request needs to reach its limit, and the blocks that it frees when it ends."""

    needed: int
    held: int


def all_can_finish(free: int, claims: Iterable[Claim]) -> bool:
    """Return whether requests can finish one after the other if `free` blocks are free now."""
    for claim in sorted(claims, key=lambda claim: claim.needed):
        if claim.needed > free:
            return False
        free += claim.held
    return True


class Room:
    """The room in the KV cache at the beginning of a step.

    is_ample  True if all requests can grow to their limits at the same time
    """

    def __init__(self, kv: KVCache, running: Mapping[Answer, Slot], free: int) -> None:
        """Compute the claims of the running requests. `free` includes blocks that only idle sequences hold."""
        self._kv = kv
        self._free = free
        self._needed = {answer: kv.needed(slot.index, answer.most_rows) for answer, slot in running.items()}
        # A request that runs alone can always finish: it may use the whole cache.
        self.is_ample = len(running) < 2 or sum(self._needed.values()) <= free
        self._claims: dict[Answer, Claim] = {}
        if not self.is_ample:
            self._claims = {
                answer: Claim(self._needed[answer], kv.held([slot.index])) for answer, slot in running.items()
            }

    @property
    def suffices(self) -> bool:
        """True if all running requests can finish."""
        return self.is_ample or all_can_finish(self._free, self._claims.values())

    def take(self, answer: Answer, slot: Slot, n: int) -> bool:
        """Reserve the blocks that a request needs to grow to n tokens, if all requests can still finish afterwards."""
        if self.is_ample:
            return True
        taken, claim = self._kv.needed(slot.index, n), self._claims[answer]
        if taken > self._free:
            return False
        after = {**self._claims, answer: Claim(max(0, claim.needed - taken), claim.held + taken)}
        if not all_can_finish(self._free - taken, after.values()):
            return False
        self._claims = after
        self._free -= taken
        return True


# The longest step with prompts while answers are in progress: 0.1 s or 2.5 steps without prompts, whichever is longer.
# Longer steps make those answers stutter; shorter steps delay the first tokens of other answers.
_SECONDS_BESIDE_ANSWERS: Final = 0.1
_STEPS_BESIDE_ANSWERS: Final = 2.5
_LONGEST_WAIT_S: Final = 0.3  # for a token of an answer while images are encoded in the engine's thread
# The longest steps without answers in progress: for a single request, and with several requests. Requests that arrive
# during a step wait until the step ends. At a depth of 30,000 tokens, MOST_ROWS rows of a 1.5B model take 4 to 10 s on
# two cores.
_SECONDS_ALONE: Final = 2.0
_SECONDS_WITHOUT_ANSWERS: Final = 1.0
# Large chunks of a single prompt have a multiple of this number of rows, so that the tiles of kernels are full. With
# several prompts, this rounding would leave a few rows for the next prompt, which would then wait for its next turn.
_TILE_ROWS: Final = 16


class ChunkRule(NamedTuple):
    """Decides how many rows of a prompt a step takes. Predictions use it, too. The fields are those of Scheduler."""

    costs: StepCosts
    rows_per_step: int
    by_seconds: bool
    encodes: bool = False

    def budget(self, answers: StepSize) -> float:
        """Return the seconds that a step with prompts may take while these answers are in progress."""
        if not answers.answers:
            return _SECONDS_WITHOUT_ANSWERS
        return max(_SECONDS_BESIDE_ANSWERS, _STEPS_BESIDE_ANSWERS * self.costs.of_step(answers))

    def seconds(self, answers: StepSize, *, is_alone: bool) -> float:
        """Return the same as `budget`, or more for the step of a prompt that no other request has to wait for.

        is_alone  True if there is only one prompt and no request waits
        """
        return _SECONDS_ALONE if is_alone and not answers.answers else self.budget(answers)

    def encoding_seconds(self, answers: StepSize, *, is_shared: bool) -> float:
        """Return how long an image may be encoded in the engine's thread before a step with these answers.

        The encoding takes what a step with prompts could take beside the answers. The answers wait for at most
        _LONGEST_WAIT_S, but the encoding always takes at least a third of the time.

        is_shared  True if prompts or texts to embed also run, so that the encoding takes half of this time
        """
        budget = self.budget(answers)
        if answers.answers:
            step_s = self.costs.of_step(answers)
            budget = max(min(budget, _LONGEST_WAIT_S) - step_s, step_s / 2)
        return budget / 2 if is_shared else budget

    def rows(
        self,
        most: int,
        seconds: float,
        size: StepSize,
        depth: int,
        least: int,
        *,
        beside_answers: bool,
        is_single: bool,
        cautious: bool = True,
    ) -> int:
        """Return how many of the next `most` rows of a prompt run in a step of `seconds`.

        size       the rest of the step
        is_single  True if no other prompt is running
        The other parameters are those of `StepCosts.rows_within`.
        """
        if not self.by_seconds:
            return most
        if beside_answers:
            allowed = self.costs.rows_within(seconds, size, depth, least, cautious=cautious)
        else:
            allowed = self.costs.rows_alone(seconds, size, depth, least)
        if allowed >= most:
            return most
        return allowed - allowed % _TILE_ROWS if is_single and allowed >= EFFICIENT_ROWS else allowed


# The maximum number of rows in a step that are needed for log-probabilities of prompts. With a vocabulary of 151,936
# tokens, their logits take 39 MB. llama.cpp returns at most this many rows from a forward pass.
_MOST_DESCRIBED: Final = 64


class Scheduler:
    """Divides steps among the running requests.

    rows_per_step  the maximum number of prompt tokens in a step
    by_seconds     whether the predicted time of a step limits its prompt tokens, too. Only backends whose results do
                   not depend on the batch may be scheduled by measured times
    costs          learns how long steps take
    encodes        whether images are encoded in the thread that runs the steps
    max_sequences  the number of sequences of the cache. The backend expects ROWS_PER_ANSWER rows of logits for each
    """

    def __init__(
        self,
        rows_per_step: int,
        speculation: Speculation,
        costs: StepCosts,
        *,
        by_seconds: bool,
        max_sequences: int,
        encodes: bool = False,
    ):
        self._rows_per_step = rows_per_step
        self._most_described = min(_MOST_DESCRIBED, ROWS_PER_ANSWER * max_sequences)
        self._speculation = speculation
        self._by_seconds = by_seconds
        self._encodes = encodes
        self._step = 0
        self._sliced_s = 0.0
        self.costs = costs

    def pick(
        self, running: Mapping[Answer, Slot], waiting: Sequence[Answer], room: Room, sliced_s: float = 0.0
    ) -> list[Work]:
        """Choose the next tokens of each running request: tokens of an answer and a draft, or a chunk of a prompt.

        Steps with prompts have no drafts, because additional rows are not cheap in large steps. A request pauses if its
        tokens would take the room that other requests need to finish. A request whose next row belongs to an image that
        is not encoded yet waits, as if it were in the queue.

        sliced_s  how long an image was encoded in this thread since the last step, which leaves less time for prompts
        """
        self._step += 1
        self._sliced_s = sliced_s
        lacking = [answer for answer, slot in running.items() if answer.lacks_image(len(slot.tokens))]
        running = {answer: slot for answer, slot in running.items() if answer not in lacking}
        waiting = [*waiting, *lacking]
        for answer, slot in running.items():
            if answer.runs_alone and (work := self._divided({answer: slot}, waiting, room)):
                return work
        return self._divided({answer: slot for answer, slot in running.items() if not answer.runs_alone}, waiting, room)

    def _divided(self, running: Mapping[Answer, Slot], waiting: Sequence[Answer], room: Room) -> list[Work]:
        """Divide a step among the running requests."""
        most = max(self._rows_per_step // max(len(running), 1), 1)
        prompts = {answer: slot for answer, slot in running.items() if len(answer.tokens) - len(slot.tokens) > 1}
        work = [Work.next_of(answer, slot, most) for answer, slot in running.items() if answer not in prompts]
        work = [part for part in work if _has_room(part, room)]
        left = max(self._rows_per_step - sum(part.rows for part in work), 1)
        if prompts:
            work += self._chunks(prompts, waiting, room, left, size_of(work))
        elif room.is_ample:
            work = self._speculation.with_drafts(work, left)
        for part in work:
            part.answer.last_step = self._step
        return work

    def rows_beside_answers(self, running: Mapping[Answer, Slot]) -> int:
        """Return how many rows of other work may run before the next step of the running requests."""
        answers = _answers_in(running)
        if not answers.answers or not self._by_seconds:
            return MOST_ROWS
        return self.costs.rows_within(self.chunks.budget(answers), EMPTY, 0)

    def encoding_seconds(self, running: Mapping[Answer, Slot], *, embeds: bool) -> float:
        """Return how long an image may be encoded in this thread before the next step of the running requests.

        embeds  True if texts are being embedded between the steps
        """
        able = {answer: slot for answer, slot in running.items() if not answer.lacks_image(len(slot.tokens))}
        answers = _answers_in(able)
        return self.chunks.encoding_seconds(answers, is_shared=embeds or len(able) > answers.answers)

    def observe(self, work: Sequence[Work], seconds: float, *, is_disturbed: bool = False) -> None:
        """Record the duration of a step that has been run.

        is_disturbed  True if other work may have slowed down the step. Its duration counts only if none is known
        """
        for part in work:
            part.answer.runs_alone = False
        n_prompt_rows = _prompt_rows(work)
        if is_disturbed and (self.costs.knows_prompts if n_prompt_rows else self.costs.known):
            return
        if not n_prompt_rows:
            self._speculation.observe_step(work, seconds)
        self.costs.observe(size_of(work), n_prompt_rows, seconds)

    def expected_seconds(self, work: Sequence[Work]) -> float:
        """Return the expected seconds of a step."""
        return self.costs.of_step(size_of(work), _prompt_rows(work))

    def expected_progress(self, work: Sequence[Work], seconds: float) -> list[PrefillProgress]:
        """Return the probable progress of the prompts in a step that began `seconds` ago and is still running."""
        share = min(seconds / self.expected_seconds(work), 1.0)
        prompts = [part for part in work if part.answer.in_prefill]
        return [_progress(part.answer, part.depth + int(share * len(part.tokens))) for part in prompts]

    @property
    def chunks(self) -> ChunkRule:
        """The rule for the sizes of chunks, with the current costs."""
        return ChunkRule(self.costs, self._rows_per_step, self._by_seconds, self._encodes)

    def _chunks(
        self, prompts: Mapping[Answer, Slot], waiting: Sequence[Answer], room: Room, left: int, size: StepSize
    ) -> Iterator[Work]:
        """Yield the next chunks of prompts, which take at most `left` rows and the budget's seconds.

        size  the size of the step without them
        """
        rule, is_single, beside_answers = self.chunks, len(prompts) == 1, size.answers > 0
        seconds = rule.seconds(size, is_alone=is_single and not waiting) - self._sliced_s
        least, describable = 1, self._most_described
        reading = list(prompts.items())
        lengths = [(len(answer.tokens) - len(slot.tokens), answer.last_step) for answer, slot in reading]
        for index in prompt_order(lengths, self._step):
            answer, slot = reading[index]
            depth = len(slot.tokens)
            rows = min(left, rows_until_copy(answer, slot, waiting))
            if answer.rows_to_describe(depth, depth + rows):
                rows = min(rows, describable)
            rows = rule.rows(rows, seconds, size, depth, least, beside_answers=beside_answers, is_single=is_single)
            if rows < 1:
                continue
            part = Work.next_of(answer, slot, rows)
            if _has_room(part, room):
                size = size.with_chunk(part.rows, depth)
                left -= part.rows
                describable -= part.described_prompt
                least = 0
                yield part


def _answers_in(running: Mapping[Answer, Slot]) -> StepSize:
    """Return the size of a step that has a row for each answer in progress and no other rows."""
    depths = [len(slot.tokens) for answer, slot in running.items() if not answer.in_prefill]
    return StepSize(len(depths), len(depths), sum(depths), sum(depths))


def _has_room(part: Work, room: Room) -> bool:
    """Reserve the room for a part of a step. If there is too little room, the request pauses."""
    part.answer.paused_at = None if room.take(part.answer, part.slot, part.end) else part.end
    return part.answer.paused_at is None


def begun_by(work: Sequence[Work], waiting: Sequence[Answer] = ()) -> list[int]:
    """Record the start of requests that run or wait for an image for the first time, and return their ids.

    A request that has to run alone begins again if its first step was cancelled or found the cache full.
    """
    new = [part.answer for part in work if part.answer.prefill_started is None or part.answer.runs_alone]
    new += [answer for answer in waiting if answer.prefill_started is None and answer not in new]
    for answer in new:
        answer.prefill_started = answer.prefill_started or time.perf_counter()
    return [answer.request_id for answer in new]
