"""Chooses the tokens that each running request runs in the next step.

A request whose prompt begins like that of a running one waits until the running one has computed the common prefix, and
then copies it. Without this, eight samples of a prompt of 1,000 tokens would compute 8,000 rows.

A request is admitted, and grows, only as long as all running requests can still reach their limits one after the other:
the one that needs the fewest blocks first, then the next one with the blocks that the first one held, and so on. This
is the banker's algorithm (Dijkstra, EWD 108) for a single resource. Requests that have to pause lose nothing but time,
so no request fails or is computed twice for lack of room.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llmrun.engine.answer import Answer, PrefixWait
from llmrun.engine.costs import EMPTY, MOST_ROWS, StepCosts, StepSize
from llmrun.engine.scheduling.fairness import prompt_order
from llmrun.engine.slots import common_prefix
from llmrun.engine.work import Work, size_of

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.slots import Slot
    from llmrun.engine.work import Speculation

# Waiting can delay a request by a step, which costs about as much as 8 to 16 rows of a prompt.
LEAST_SHARED: Final = 16  # tokens


def wait_for_prefix(answer: Answer, running: Mapping[Answer, Slot], cached: int) -> PrefixWait | None:
    """Return the prefix that a request should wait for, or None if it should start.

    cached  how many of its tokens are in the cache already
    """
    tokens = answer.cached_as
    waits = [
        PrefixWait(leader, min(common_prefix(leader.cached_as, tokens), len(tokens) - 1))
        for leader, slot in running.items()
        if leader.prefix_scope == answer.prefix_scope and len(leader.tokens) - len(slot.tokens) > 1
    ]
    longest = max(waits, key=lambda wait: wait.n, default=None)
    return longest if longest and longest.n - cached >= LEAST_SHARED else None


def is_over(wait: PrefixWait, running: Mapping[Answer, Slot]) -> bool:
    """Return whether the leader has computed the prefix, or never will, for example because it was cancelled."""
    slot = running.get(wait.leader)
    return slot is None or len(slot.tokens) >= wait.n


def rows_until_copy(leader: Answer, slot: Slot, waiting: Iterable[Answer]) -> int:
    """Return how many rows the leader may run before a waiting request copies its tokens.

    The step must end there, because a recurrent state can be copied only at its current position.
    """
    ends = [each.wait.n for each in waiting if each.wait is not None and each.wait.leader is leader]
    return min((end for end in ends if end > len(slot.tokens)), default=len(leader.tokens)) - len(slot.tokens)


@dataclass(frozen=True, slots=True)
class Claim:
    """The blocks that a running request needs to reach its limit, and those that it gives back when it ends."""

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
        # The last token of an answer is never run, so it takes no room.
        self._needed = {answer: kv.needed(slot.index, answer.limit - 1) for answer, slot in running.items()}
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
        """Take the blocks with which a request grows to n tokens, if all requests can still finish afterwards."""
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
# Longer steps make those answers stutter; shorter ones delay the first tokens of others.
_SECONDS_BESIDE_ANSWERS: Final = 0.1
_STEPS_BESIDE_ANSWERS: Final = 2.5
_SECONDS_WITHOUT_ANSWERS: Final = 1.0  # bounds how long a short prompt waits for the step of a long one


class Scheduler:
    """Divides steps among the running requests.

    rows_per_step  the maximum number of prompt tokens in a step
    by_seconds     whether the predicted time of a step limits its prompt tokens, too. Only backends whose results do
                   not depend on the batch may be scheduled by measured times
    costs          learns how long steps take
    """

    def __init__(self, rows_per_step: int, speculation: Speculation, costs: StepCosts, *, by_seconds: bool):
        self._rows_per_step = rows_per_step
        self._speculation = speculation
        self._by_seconds = by_seconds
        self._step = 0
        self.costs = costs

    def pick(self, running: Mapping[Answer, Slot], waiting: Sequence[Answer], room: Room) -> list[Work]:
        """Choose the next tokens of each running request: those of an answer and a draft, or a chunk of a prompt.

        Steps with prompts have no drafts, because additional rows are not cheap in large steps. A request pauses if its
        tokens would take the room that others need to finish.
        """
        self._step += 1
        for answer, slot in running.items():
            if answer.runs_alone and (work := self._divided({answer: slot}, waiting, room)):
                return work
        return self._divided({answer: slot for answer, slot in running.items() if not answer.runs_alone}, waiting, room)

    def _divided(self, running: Mapping[Answer, Slot], waiting: Sequence[Answer], room: Room) -> list[Work]:
        """Divide a step among these requests."""
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
        """Return how many rows of other work may run before the next step of these requests."""
        depths = [len(slot.tokens) for answer, slot in running.items() if not answer.in_prefill]
        if not depths or not self._by_seconds:
            return MOST_ROWS
        answers = StepSize(len(depths), len(depths), sum(depths), sum(depths))
        return self.costs.rows_within(self.budget(answers), EMPTY, 0)

    def observe(self, work: Sequence[Work], seconds: float) -> None:
        """Record the duration of a step that has been run."""
        for part in work:
            part.answer.runs_alone = False
        n_prompt_rows = sum(part.rows for part in work if not part.decodes)
        if not n_prompt_rows:
            self._speculation.observe_step(work, seconds)
        self.costs.observe(size_of(work), n_prompt_rows, seconds)

    def budget(self, answers: StepSize) -> float:
        """Return the seconds that a step with prompts may take beside these answers."""
        if not answers.answers:
            return _SECONDS_WITHOUT_ANSWERS
        return max(_SECONDS_BESIDE_ANSWERS, _STEPS_BESIDE_ANSWERS * self.costs.of_step(answers))

    def _chunks(
        self, prompts: Mapping[Answer, Slot], waiting: Sequence[Answer], room: Room, left: int, size: StepSize
    ) -> Iterator[Work]:
        """Yield the next chunks of prompts, which take at most `left` rows and the budget's seconds.

        size  the size of the step without them
        """
        seconds, least = self.budget(size), 1
        reading = list(prompts.items())
        lengths = [(len(answer.tokens) - len(slot.tokens), answer.last_step) for answer, slot in reading]
        for index in prompt_order(lengths, self._step):
            answer, slot = reading[index]
            depth = len(slot.tokens)
            rows = min(left, rows_until_copy(answer, slot, waiting))
            # `rows_within` is careful with sizes that are new. That is needed only if answers wait.
            fits = not size.answers and self.costs.of_step(size.with_chunk(rows, depth), rows) <= seconds
            if self._by_seconds and not fits:
                rows = min(rows, self.costs.rows_within(seconds, size, depth, least))
            if rows < 1:
                continue
            part = Work.next_of(answer, slot, rows)
            if _has_room(part, room):
                size = size.with_chunk(part.rows, depth)
                left -= part.rows
                least = 0
                yield part


def _has_room(part: Work, room: Room) -> bool:
    """Take the room for a part of a step. If there is none, its request pauses."""
    part.answer.paused_at = None if room.take(part.answer, part.slot, part.end) else part.end
    return part.answer.paused_at is None


def begun_by(work: Sequence[Work]) -> list[int]:
    """Note the start of requests that run for the first time in this step, and return their ids.

    A request that has to run alone begins again if its first step was cancelled or found the cache full.
    """
    new = [part.answer for part in work if part.answer.prefill_started is None or part.answer.runs_alone]
    for answer in new:
        answer.prefill_started = answer.prefill_started or time.perf_counter()
    return [answer.request_id for answer in new]
