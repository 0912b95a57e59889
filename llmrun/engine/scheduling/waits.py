"""Predicts when a request starts and when its first token arrives, by simulating the steps until then.

Servers report both times to clients. The lengths of answers, which affect the times, are learnt here, too.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.types import FinishReason
from llmrun.engine.answer import ExpectedPrefix
from llmrun.engine.costs import StepSize
from llmrun.engine.scheduling.fairness import TURNS
from llmrun.engine.scheduling.scheduler import LEAST_SHARED
from llmrun.engine.slots import common_prefix

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.answer import Answer
    from llmrun.engine.scheduling.scheduler import ChunkRule, Scheduler, Work
    from llmrun.engine.slots import SequenceSlots, Slot

_ASSUMED_LENGTH: Final = 200  # tokens, until an answer of the class has ended
_REMEMBERED: Final = 128  # answers of a class
_GOLDEN: Final = 0.618034  # multiples of this number, modulo 1, are always spread evenly
# Steps are simulated together until a prompt has grown by an eighth of its depth, or by this many tokens.
_TOGETHER: Final = 512
# After this many rounds of a simulation, each further round takes at least this share of the time so far, unless all
# running answers or prompts end earlier.
_EXACT_ROUNDS: Final = 100
_COARSENESS: Final = 0.02
# After this many rounds, requests that end are not followed by further ones, which could hold up a long prompt for
# thousands of rounds.
_FOLLOWED_ROUNDS: Final = 400

_ASSUMED_SHARE: Final = 0.8  # the share of requests that are followed by another one, until requests have ended
_USUAL_SHARE: Final = 0.7  # from this share on, all requests are assumed to be followed
_LEARNT: Final = 0.2  # the weight of the last request in this share
_RECENT: Final = 15  # requests whose prompts are remembered
_FOLLOWED_S: Final = 10.0  # a request follows another one if it arrives at most this many seconds after the other's end


class AnswerLengths:
    """The distribution of the lengths of answers, by the order of magnitude of their limits.

    A mean would not suffice: the first of 32 running answers ends long before an answer of mean length.

    Other threads may call `remaining` while one thread calls `observe`.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[int]] = {}
        self._sorted: dict[int, list[int]] = {}

    def observe(self, limit: int, length: int) -> None:
        """Record the length, in tokens, of an answer that has ended by itself or at its limit."""
        recent = self._recent.setdefault(limit.bit_length(), deque(maxlen=_REMEMBERED))
        recent.append(length)
        self._sorted[limit.bit_length()] = sorted(recent)  # a new list: another thread may be reading the old one

    def remaining(self, limit: int, generated: int, quantile: float) -> float:
        """Return a quantile, at least 1, of the number of tokens that an answer will still generate.

        quantile  0 <= quantile < 1
        """
        lengths = self._sorted.get(limit.bit_length(), [_ASSUMED_LENGTH])
        shorter = bisect_right(lengths, generated)
        longer = len(lengths) - shorter
        # An answer that is longer than all known answers will probably double in length.
        expected = lengths[shorter + int(quantile * longer)] - generated if longer else generated
        return max(min(expected, limit - generated), 1)


class Successors:
    """Learns how often a request is followed by another one when it has ended, as in chats and with agents.

    share   the share of recent requests that were followed
    prompt  the median prompt of recent requests: the tokens to compute and the cached tokens

    Other threads may call `arrived`.
    """

    def __init__(self) -> None:
        self.share = _ASSUMED_SHARE
        self.prompt = (_ASSUMED_LENGTH, 0)
        self._prompts: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._ends: deque[float] = deque()  # when requests ended that have not been followed yet

    def arrived(self) -> None:
        """Record that a request was queued."""
        self._drop_old()
        with suppress(IndexError):
            self._ends.popleft()
            self.share += _LEARNT * (1 - self.share)

    def ended(self, computed: int, cached: int) -> None:
        """Record that a request has ended."""
        self._drop_old()
        self._ends.append(time.perf_counter())
        self._prompts.append((computed, cached))
        self.prompt = sorted(self._prompts)[len(self._prompts) // 2]

    def _drop_old(self) -> None:
        with suppress(IndexError):
            while self._ends[0] < time.perf_counter() - _FOLLOWED_S:
                self._ends.popleft()
                self.share -= _LEARNT * self.share


class Load(Struct, frozen=True):
    """The remaining work of a running or waiting request.

    missing    tokens of its prompt that are not in the cache
    depth      tokens in the cache
    generated  tokens of its answer so far
    limit      the largest length of its answer
    blocks     the blocks of the KV cache that are reserved for it, or that it will reserve
    load_s     seconds to load a saved prefix, which the cache then contains
    images     seconds to encode each of its images by key, one after the other. Other requests run during that time,
               or between slices of it (`ChunkRule.encodes`)
    leader     the number of the request that computes the `depth` tokens first, or None. Running requests are numbered
               first, and then the waiting ones
    computed   tokens of its prompt that the engine computes, because they are not in the cache when it begins
    """

    missing: int
    depth: int
    generated: int
    limit: int
    blocks: int
    load_s: float = 0.0
    images: Mapping[Hashable, float] = {}
    leader: int | None = None
    computed: int = 0


class Prediction(NamedTuple):
    """What will happen to a request, in seconds from now.

    wait_s         until the request is admitted; math.inf if it never can be
    first_token_s  until its first token; None if that is unknown
    """

    wait_s: float
    first_token_s: float | None


@dataclass(slots=True, eq=False)
class _Prompt:
    """A running prompt. `last` is the number of the last simulated step that had rows of this prompt."""

    index: int
    missing: int
    depth: int
    last: int = 0


class Simulation:
    """Simulates the steps of running requests, and of waiting requests in the order of their admission.

    free_blocks      blocks that are not reserved, including those of idle prefixes
    tokens_per_step  tokens of each answer in a step without prompts, which can have drafts
    step_left_s      seconds until the step that is running ends, whose effects `running` includes

    Steps of almost the same size are simulated together, so a prompt of 19,000 tokens takes about 0.3 ms. Each answer
    is assumed to have a length from the observed distribution. Once the requests of interest are running, requests that
    end are followed by new ones as often as before.
    """

    def __init__(
        self,
        running: Sequence[Load],
        waiting: Sequence[Load],
        *,
        free_slots: int,
        free_blocks: int,
        rule: ChunkRule,
        lengths: AnswerLengths,
        tokens_per_step: float,
        step_left_s: float = 0.0,
        successors: Successors | None = None,
    ) -> None:
        self._loads = [*running, *waiting]
        self._successors, self._due = successors, 0.5  # the requests that should have followed by now, rounded
        self._slots, self._blocks = free_slots, free_blocks
        self._rule, self._lengths, self._tokens_per_step = rule, lengths, tokens_per_step
        self._now = step_left_s
        # The tokens that an answer has generated so far if it was in progress all the time.
        self._tokens = 0.0
        # A heap of the answers: `_tokens` at an answer's end, its number, and its depth when `_tokens` was 0.
        self._ends: list[tuple[float, int, float]] = []
        self._depth = 0.0  # the sum of the answers' depths at the beginning, without later tokens
        self._prompts: list[_Prompt] = []
        self._encoded: dict[Hashable, float] = {}  # when each image is encoded, once for all prompts that have it
        self._encoding: list[tuple[float, int]] = []  # a heap: when all images of a prompt are encoded, and its number
        self._n_steps = 0
        self._shortest_s = 0.0  # the shortest time to simulate at once
        self._is_turn = False  # True if the prompt that has waited longest is first
        self._queue = list(range(len(running), len(self._loads)))
        self._copied: dict[int, list[int]] = {}  # the lengths of the prefixes that are copied from each request
        for load in waiting:
            if load.leader is not None:
                self._copied.setdefault(load.leader, []).append(load.depth)
        self.admitted: dict[int, float] = {}
        self.first_tokens: dict[int, float] = {}
        for index, load in enumerate(running):
            self._begin(index, load)

    def run(self, until: Collection[int]) -> None:
        """Simulate steps until the first tokens of these requests, or until no request can be admitted."""
        self._admit()
        n_rounds = 0
        while not self.first_tokens.keys() >= set(until) and (self._prompts or self._ends or self._encoding):
            n_rounds += 1
            if n_rounds > _EXACT_ROUNDS:
                self._shortest_s = _COARSENESS * self._now
            if self._prompts:
                self._run_prompts()
            elif self._ends:
                self._run_answers()
            else:
                self._now = max(self._now, self._encoding[0][0])
            while self._encoding and self._encoding[0][0] <= self._now:
                _, index = heappop(self._encoding)
                self._prompts.append(_Prompt(index, self._loads[index].missing, self._loads[index].depth))
            while self._ends and self._ends[0][0] <= self._tokens:
                _, index, depth = heappop(self._ends)
                load = self._loads[index]
                self._slots, self._blocks, self._depth = (
                    self._slots + 1,
                    self._blocks + load.blocks,
                    self._depth - depth,
                )
                if self._successors is not None and n_rounds < _FOLLOWED_ROUNDS and self.admitted.keys() >= set(until):
                    self._follow(load, self._successors)
            self._admit()

    def _follow(self, load: Load, successors: Successors) -> None:
        """Queue a request that follows one that has ended, if one is due."""
        self._due += successors.share if successors.share < _USUAL_SHARE else 1.0
        if self._due >= 1:
            self._due -= 1
            computed, cached = successors.prompt
            computed = max(min(computed, load.computed), 1)
            self._queue.append(len(self._loads))
            self._loads.append(Load(computed, cached, 0, load.limit, load.blocks, computed=computed))

    def _begin(self, index: int, load: Load) -> None:
        self.admitted[index] = self._now
        if load.images:
            for key, seconds in load.images.items():
                begin = max(self._now, next(reversed(self._encoded.values()), 0.0))
                self._encoded.setdefault(key, begin + seconds)
            heappush(self._encoding, (max(self._encoded[key] for key in load.images), index))
        elif load.missing:
            self._prompts.append(_Prompt(index, load.missing, load.depth))
        else:
            self._answer(index, load.depth)

    def _answer(self, index: int, depth: int) -> None:
        """Record that a request's prompt is complete."""
        load = self._loads[index]
        self.first_tokens[index] = self._now
        tokens = self._lengths.remaining(load.limit, load.generated, index * _GOLDEN % 1)
        heappush(self._ends, (self._tokens + tokens, index, depth - self._tokens))
        self._depth += depth - self._tokens

    def _admit(self) -> None:
        depths = {prompt.index: prompt.depth for prompt in self._prompts}
        for index in [*self._queue] if self._slots else ():
            load = self._loads[index]
            leader = load.leader
            if leader is not None and leader not in self.first_tokens and depths.get(leader, -1) < load.depth:
                continue
            if not self._slots or self._blocks < load.blocks:
                return
            self._queue.remove(index)
            self._slots, self._blocks = self._slots - 1, self._blocks - load.blocks
            self._begin(index, load)
            self._now += load.load_s

    def _run_answers(self) -> None:
        """Run steps without prompts until an answer ends."""
        n, tokens = len(self._ends), max(self._ends[0][0] - self._tokens, 0.0)
        depth = (self._depth + n * (self._tokens + tokens / 2)) / n
        rows = round(n * self._tokens_per_step)
        token_s = self._rule.costs.of_step(StepSize(n, rows, int(n * depth), int(rows * depth))) / self._tokens_per_step
        if self._shortest_s > token_s * tokens:
            tokens = min(self._shortest_s / token_s, self._last_end)
        slice_s = self._slice_s(StepSize(n, n, int(n * depth), int(n * depth)), is_shared=False)
        slice_s /= self._tokens_per_step
        if self._encoding:
            tokens = min(tokens, max((self._encoding[0][0] - self._now) / (slice_s or token_s), 1.0))
        self._pass(token_s * tokens, slice_s * tokens)
        self._tokens += tokens

    def _run_prompts(self) -> None:
        """Run equal steps with prompts until one of the prompts or answers ends, or the prompts have grown."""
        n, depth, unit = len(self._ends), int(self._depth + len(self._ends) * self._tokens), 1
        answers = StepSize(n, n, depth, depth)
        chunks = self._chunks(answers, unit)
        if self._shortest_s:
            step_s = self._rule.costs.of_step(_with_chunks(answers, chunks, 1), sum(rows for _, rows in chunks))
            longest = max(-(-prompt.missing // rows) for prompt, rows in chunks)
            if self._ends:
                longest = min(longest, math.ceil(self._last_end))
            unit = max(min(int(self._shortest_s / step_s), longest), 1)
            chunks = self._chunks(answers, unit)
        n_units = min(max(prompt.depth // 8, _TOGETHER) // (unit * rows) for prompt, rows in chunks)
        if len(self._prompts) > 1:  # as in `prompt_order`
            n_units = max(n_units // TURNS, 1) * (1 if self._is_turn else TURNS - 1)
            self._is_turn = not self._is_turn
        n_units = min(n_units, *(prompt.missing // (unit * rows) for prompt, rows in chunks))
        if self._ends:
            n_units = min(n_units, math.ceil((self._ends[0][0] - self._tokens) / unit))
        slice_s = self._slice_s(answers, is_shared=True)
        if slice_s:
            n_units = min(n_units, math.ceil((self._encoding[0][0] - self._now) / (slice_s * unit)))
        n_steps = unit * max(n_units, 1)
        depth += n * n_steps // 2
        size = _with_chunks(StepSize(n, n, depth, depth), chunks, n_steps)
        prompt_rows = sum(rows for prompt, rows in chunks if prompt.missing > 1)  # as in `Work.decodes`
        self._pass(n_steps * self._rule.costs.of_step(size, prompt_rows), n_steps * slice_s)
        self._tokens += n_steps
        self._n_steps += n_steps
        for prompt, rows in chunks:
            done = min(rows * n_steps, prompt.missing)
            prompt.missing -= done
            prompt.depth += done
            prompt.last = self._n_steps
            if not prompt.missing:
                self._prompts.remove(prompt)
                self._answer(prompt.index, prompt.depth)

    def _slice_s(self, answers: StepSize, *, is_shared: bool) -> float:
        """Return how long an image is encoded between two steps. The parameters are as in `encoding_seconds`."""
        if not self._encoding or not self._rule.encodes:
            return 0.0
        return self._rule.encoding_seconds(answers, is_shared=is_shared)

    def _pass(self, steps_s: float, slices_s: float) -> None:
        """Let the time of steps and slices pass. If there are slices, nothing is encoded during the steps."""
        if slices_s:
            self._encoded = {key: end + steps_s * (end > self._now) for key, end in self._encoded.items()}
            self._encoding = [(end + steps_s, index) for end, index in self._encoding]
        self._now += steps_s + slices_s

    @property
    def _last_end(self) -> float:
        """The number of tokens until the last answer in progress ends."""
        return max(self._ends)[0] - self._tokens

    def _chunks(self, answers: StepSize, unit: int) -> list[tuple[_Prompt, int]]:
        """Return the chunks of prompts in each of the next `unit` steps, as in `Scheduler`."""
        rule, is_single = self._rule, len(self._prompts) == 1
        seconds = rule.seconds(answers, is_alone=is_single and not self._queue)
        seconds -= self._slice_s(answers, is_shared=True)
        prompts = sorted(self._prompts, key=lambda prompt: prompt.missing)
        if self._is_turn:
            first = min(prompts, key=lambda prompt: prompt.last)
            prompts.remove(first)
            prompts.insert(0, first)
        left, least, size, chunks = max(rule.rows_per_step - answers.rows, 1), 1, answers, []
        for prompt in prompts:
            most = min(left, -(-prompt.missing // unit), self._rows_until_copy(prompt))
            rows = rule.rows(
                most,
                seconds,
                size,
                prompt.depth,
                least,
                beside_answers=answers.answers > 0,
                is_single=is_single,
                cautious=False,
            )
            if rows < 1:
                break
            chunks.append((prompt, rows))
            size, left, least = size.with_chunk(rows, prompt.depth), left - rows, 0
        return chunks

    def _rows_until_copy(self, prompt: _Prompt) -> int:
        ends = [end for end in self._copied.get(prompt.index, ()) if end > prompt.depth]
        return min(ends, default=prompt.depth + prompt.missing) - prompt.depth


def _with_chunks(size: StepSize, chunks: Sequence[tuple[_Prompt, int]], n_steps: int) -> StepSize:
    """Return the mean size of `n_steps` steps with these chunks."""
    for prompt, rows in chunks:
        size = size.with_chunk(rows, prompt.depth + rows * (n_steps - 1) // 2)
    return size


class Outlook:
    """Predicts the times of requests, and learns the lengths of answers from the answers that have ended.

    images_s  returns the seconds for encoding each image of a request from a position on, by key; thread-safe
    """

    def __init__(
        self,
        kv: KVCache,
        scheduler: Scheduler,
        slots: SequenceSlots,
        max_running: int,
        images_s: Callable[[Answer, int], Mapping[Hashable, float]],
    ) -> None:
        self._kv = kv
        self._n_blocks = kv.capacity // kv.block_size
        self._scheduler = scheduler
        self._slots = slots
        self._max_running = max_running
        self._images_s = images_s
        self._lengths = AnswerLengths()
        self._prompt_tokens = self._computed_tokens = 1
        self._answer_tokens = self._answer_steps = 1
        self.successors = Successors()

    def observe(self, answer: Answer) -> None:
        """Record a request that has ended."""
        self._prompt_tokens += answer.prompt_tokens
        self._computed_tokens += answer.prompt_tokens - (answer.cached_tokens or 0)
        self._answer_tokens += answer.generated_tokens
        self._answer_steps += len(answer.step_times)
        if answer.ended_by is not FinishReason.CANCELLED:
            self.successors.ended(answer.prompt_tokens - (answer.cached_tokens or 0), answer.cached_tokens or 0)
            self._lengths.observe(answer.limit - answer.prompt_tokens, answer.generated_tokens)

    def of(
        self,
        new: Answer,
        before: Sequence[Answer],
        running: Mapping[Answer, Slot],
        step: tuple[list[Work], float] | None,
    ) -> Prediction:
        """Return the prediction for a new request, if the requests in `before` are admitted first.

        step  the work of the step that is running and the seconds since its beginning, or None
        """
        new.expected = self._expected(new, before, running)
        simulation = self._simulation([*before, new], running, step)
        index = len(running) + len(before)
        knows_prompts = self._scheduler.costs.knows_prompts
        simulation.run([index])
        wait_s = simulation.admitted.get(index, math.inf)
        return Prediction(wait_s, simulation.first_tokens.get(index) if knows_prompts else None)

    def left(
        self, waiting: Sequence[Answer], running: Mapping[Answer, Slot], step: tuple[list[Work], float]
    ) -> dict[int, float]:
        """Return the seconds until the first token of each running prompt, by the request's id."""
        if not self._scheduler.costs.knows_prompts:
            return {}
        simulation = self._simulation(waiting, running, step)
        prompts = {index: answer for index, answer in enumerate(running) if answer.in_prefill}
        simulation.run(prompts)
        times = simulation.first_tokens
        return {answer.request_id: times[index] for index, answer in prompts.items() if index in times}

    def _simulation(
        self, waiting: Sequence[Answer], running: Mapping[Answer, Slot], step: tuple[list[Work], float] | None
    ) -> Simulation:
        work, seconds = step or ([], 0.0)
        left_s = max(self._scheduler.expected_seconds(work) - seconds, 0.0) if work else 0.0
        ends = {part.answer: part.end for part in work}
        loads = [self._load(answer, max(len(slot.tokens), ends.get(answer, 0))) for answer, slot in running.items()]
        numbers = {answer.request_id: number for number, answer in enumerate([*running, *waiting])}
        return Simulation(
            loads,
            [self._waiting_load(answer, numbers) for answer in waiting],
            free_slots=self._max_running - len(running),
            free_blocks=self._n_blocks - sum(load.blocks for load in loads),
            rule=self._scheduler.chunks,
            lengths=self._lengths,
            tokens_per_step=self._answer_tokens / self._answer_steps,
            step_left_s=left_s,
            successors=self.successors,
        )

    def _expected(self, new: Answer, before: Sequence[Answer], running: Mapping[Answer, Slot]) -> ExpectedPrefix:
        """Return the prefix with which a request will probably start."""
        tokens, scope = new.reusable, new.prefix_scope
        cached, load_s = self._slots.expected(tokens, scope, new.saved)
        leader: Answer | None = None
        shared = cached + LEAST_SHARED - 1
        for other in [answer for answer in (*running, *before) if answer.prefix_scope == scope and answer.in_prefill]:
            if (n := min(common_prefix(other.cached_as, tokens), len(tokens) - 1)) > shared:
                leader, shared = other, n
        return ExpectedPrefix(cached, load_s) if leader is None else ExpectedPrefix(shared, leader=leader.request_id)

    def _waiting_load(self, answer: Answer, numbers: Mapping[int, int]) -> Load:
        """Return the load of a waiting request. An unknown cached prefix is assumed to have the average length."""
        prefix = answer.expected
        if prefix is None:
            return self._load(answer, int(answer.prompt_tokens * (1 - self._computed_tokens / self._prompt_tokens)))
        leader = None if prefix.leader is None else numbers.get(prefix.leader)
        return replace(self._load(answer, prefix.n), load_s=prefix.load_s, leader=leader)

    def _load(self, answer: Answer, depth: int) -> Load:
        most = answer.limit - answer.prompt_tokens
        length = answer.generated_tokens + self._lengths.remaining(most, answer.generated_tokens, 0.5)
        # Every accepted request can finish alone, so no request needs more than all blocks.
        blocks = min(-(-int(answer.prompt_tokens + length) // self._kv.block_size), self._n_blocks)
        missing = max(0, answer.prompt_tokens - depth)
        cached = min(depth, answer.prompt_tokens) if answer.cached_tokens is None else answer.cached_tokens
        computed, images = answer.prompt_tokens - cached, self._images_s(answer, depth)
        return Load(missing, depth, answer.generated_tokens, most, blocks, images=images, computed=computed)
