"""Predicts how long a new request would wait, from the work of the requests before it.

Busy servers report the predicted wait to clients. The lengths of answers, which affect waits, are learnt here, too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from llmrun.base.types import FinishReason
from llmrun.engine.costs import StepCosts, StepSize

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.answer import Answer
    from llmrun.engine.scheduling.scheduler import Scheduler
    from llmrun.engine.slots import Slot

_ASSUMED_LENGTH: Final = 200  # tokens, until an answer of the class has ended
_REMEMBERED: Final = 128  # answers of a class
_GOLDEN: Final = 0.618034  # multiples of this number, modulo 1, are always spread evenly


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


class Load(Struct, frozen=True):
    """The remaining work of a running or waiting request.

    missing    tokens of its prompt that are not in the cache
    depth      tokens in the cache
    generated  tokens of its answer so far
    limit      the largest length of its answer
    blocks     the blocks of the KV cache that are reserved for it, or that it will reserve
    """

    missing: int
    depth: int
    generated: int
    limit: int
    blocks: int


def predicted_wait(
    new: Load,
    waiting: Sequence[Load],
    running: Sequence[Load],
    *,
    free_slots: int,
    free_blocks: int,
    costs: StepCosts,
    lengths: AnswerLengths,
    tokens_per_step: float,
    budget: float,
) -> float:
    """Return the seconds until a new request is admitted; math.inf if this request or an earlier one never can be.

    waiting          the requests that will be admitted before it, in this order
    free_blocks      blocks that are not reserved, including those of idle prefixes
    tokens_per_step  tokens of each answer in a step without prompts, which can have drafts
    budget           the seconds that a step with prompts may take beside running answers

    Time is counted in steps of one size: each step has a token of every answer that is now in progress, and rows of the
    oldest prompt, if any. The result is usually within a factor of 1.5 of the actual wait, which suffices for telling
    clients when to retry.
    """
    loads = [*running, *waiting, new]
    depth = sum(load.depth + load.missing for load in loads) // len(loads)
    attended = sum(load.missing * (load.depth + load.missing // 2) for load in loads)
    prompt_depth = attended // max(sum(load.missing for load in loads), 1)
    n = max(sum(not load.missing for load in running), 1)
    size = StepSize(n, n, n * depth, n * depth)
    rows = costs.rows_within(budget, size, prompt_depth)
    ends: list[tuple[float, int]] = []  # a heap: the step in which an admitted request ends, and its blocks
    slots, blocks = free_slots + len(running), free_blocks + sum(load.blocks for load in running)
    step = prompts_end = prompt_steps = 0.0  # `prompt_steps` of the steps until `prompts_end` have rows of prompts
    for index, load in enumerate(loads):
        while not slots or blocks < load.blocks:
            if not ends:
                return math.inf
            step, freed = heappop(ends)
            slots, blocks = slots + 1, blocks + freed
        slots, blocks = slots - 1, blocks - load.blocks
        longer_steps = prompt_steps - max(prompts_end - step, 0.0)  # steps with prompts until this request is admitted
        prompt_steps += load.missing / rows
        prompts_end = max(prompts_end, step) + load.missing / rows
        tokens = lengths.remaining(load.limit, load.generated, index * _GOLDEN % 1)
        heappush(ends, (tokens + (prompts_end if load.missing else step), load.blocks))
    longer = costs.of_step(size.with_chunk(rows, prompt_depth), rows)
    drafted = round(n * tokens_per_step)
    shorter = costs.of_step(StepSize(n, drafted, n * depth, drafted * depth)) / tokens_per_step
    return longer_steps * longer + (step - longer_steps) * shorter


class Outlook:
    """Predicts waits, and learns the lengths of answers from the answers that have ended."""

    def __init__(self, kv: KVCache, scheduler: Scheduler, max_running: int) -> None:
        self._kv = kv
        self._n_blocks = kv.capacity // kv.block_size
        self._scheduler = scheduler
        self._max_running = max_running
        self._lengths = AnswerLengths()
        self._prompt_tokens = self._computed_tokens = 1
        self._answer_tokens = self._answer_steps = 1

    def observe(self, answer: Answer) -> None:
        """Record a request that has ended."""
        self._prompt_tokens += answer.prompt_tokens
        self._computed_tokens += answer.prompt_tokens - (answer.cached_tokens or 0)
        self._answer_tokens += answer.generated_tokens
        self._answer_steps += len(answer.step_times)
        if answer.ended_by is not FinishReason.CANCELLED:
            self._lengths.observe(answer.limit - answer.prompt_tokens, answer.generated_tokens)

    def wait(self, new: Answer, before: Sequence[Answer], running: Mapping[Answer, Slot]) -> float:
        """Return the seconds until a new request is admitted, if the requests in `before` are admitted first."""
        answers = [slot for answer, slot in running.items() if not answer.in_prefill]
        depth = sum(len(slot.tokens) for slot in answers)
        loads = [self._load(answer, len(slot.tokens)) for answer, slot in running.items()]
        return predicted_wait(
            self._waiting_load(new),
            [self._waiting_load(answer) for answer in before],
            loads,
            free_slots=self._max_running - len(running),
            free_blocks=self._n_blocks - sum(load.blocks for load in loads),
            costs=self._scheduler.costs,
            lengths=self._lengths,
            tokens_per_step=self._answer_tokens / self._answer_steps,
            budget=self._scheduler.budget(StepSize(len(answers), len(answers), depth, depth)),
        )

    def _waiting_load(self, answer: Answer) -> Load:
        """Return the load of a request whose cached prefix is assumed to be as long as an average one."""
        return self._load(answer, int(answer.prompt_tokens * (1 - self._computed_tokens / self._prompt_tokens)))

    def _load(self, answer: Answer, depth: int) -> Load:
        most = answer.limit - answer.prompt_tokens
        length = answer.generated_tokens + self._lengths.remaining(most, answer.generated_tokens, 0.5)
        # Every accepted request can finish alone, so no request needs more than all blocks.
        blocks = min(-(-int(answer.prompt_tokens + length) // self._kv.block_size), self._n_blocks)
        missing = max(0, answer.prompt_tokens - depth)
        return Load(missing, depth, answer.generated_tokens, most, blocks)
