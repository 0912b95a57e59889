"""Predicts how long a new request would wait, by simulating the requests before it.

Servers tell clients this time when they are too busy. It depends on how long answers get, so this is learnt here, too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from llmrun.base.types import FinishReason
from llmrun.engine.drafting.costs import StepSize
from llmrun.engine.scheduling.fairness import TURNS
from llmrun.engine.scheduling.predicting import EMPTY, StepPredictor, with_chunk

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.answer import Answer
    from llmrun.engine.scheduling.scheduler import Scheduler
    from llmrun.engine.slots import Slot

_ASSUMED_LENGTH: Final = 200  # tokens, until an answer has been observed
_REMEMBERED: Final = 128  # answers of a class
_ENOUGH: Final = 8  # answers of a class, until which the lengths of all answers are used instead
_GOLDEN: Final = 0.618034  # multiples of it, modulo 1, are spread evenly, however many there are


class _Lengths:
    """The lengths of the last answers, sorted."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)
        self.sorted: list[int] = []

    def add(self, length: int) -> None:
        self._recent.append(length)
        self.sorted = sorted(self._recent)  # a new list, because another thread may be reading the old one


class AnswerLengths:
    """The distribution of the lengths of answers, by the order of magnitude of their limits.

    A mean would not do: of 32 running answers, the first ends long before an answer of mean length.

    Other threads may call `remaining` while one thread calls `observe`.
    """

    def __init__(self) -> None:
        self._all = _Lengths()
        self._classes: dict[int, _Lengths] = {}

    def observe(self, limit: int, length: int) -> None:
        """Record the length of an answer that has ended by itself or at its limit, in tokens."""
        self._all.add(length)
        self._classes.setdefault(limit.bit_length(), _Lengths()).add(length)

    def remaining(self, limit: int, generated: int, quantile: float) -> float:
        """Return a quantile of how many tokens an answer still gets, given how many it has. At least 1.

        quantile  0 <= quantile < 1
        """
        lengths = self._classes.get(limit.bit_length(), self._all).sorted
        if len(lengths) < _ENOUGH:
            lengths = self._all.sorted or [_ASSUMED_LENGTH]
        shorter = bisect_right(lengths, generated)
        longer = len(lengths) - shorter
        # An answer that is longer than all known ones will probably become twice as long as it is.
        expected = lengths[shorter + int(quantile * longer)] - generated if longer else generated
        return max(min(expected, limit - generated), 1)


@dataclass(frozen=True, slots=True)
class Load:
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


class _Pace:
    """The steps of a simulation, by the number of answers in progress.

    All answers are as deep as an average one, and prompts are counted in rows of average depth, so that only a few step
    sizes occur.
    """

    def __init__(self, loads: Sequence[Load], predictor: StepPredictor, budget: float) -> None:
        self._predictor, self._budget = predictor, budget
        self._known: dict[int, tuple[float, float, float]] = {}
        self._depth = sum(load.depth + load.missing for load in loads) // len(loads)
        attended = sum(load.missing * (load.depth + load.missing // 2) for load in loads)
        self._prompt_depth = max(attended // max(sum(load.missing for load in loads), 1), 1)
        rows = predictor.rows_within(budget, self._answers(1), self._prompt_depth)
        none = predictor.of_step(EMPTY, rows)
        shallow, deep = (predictor.of_step(with_chunk(EMPTY, rows, at), rows) - none for at in (0, self._prompt_depth))
        self._shallow = shallow / deep if 0 < shallow < deep else 1.0

    def rows(self, load: Load) -> float:
        """Return the number of rows of average depth that take as long as the missing rows of a prompt."""
        depth = (load.depth + load.missing / 2) / self._prompt_depth
        return load.missing * (self._shallow + (1 - self._shallow) * depth)

    def of(self, answers: int) -> tuple[float, float, float]:
        """Return the seconds per token without prompts, those of a step with prompts, and the prompt rows in it."""
        if answers not in self._known:
            size = self._answers(answers)
            budget = self._budget if answers else math.inf
            rows = self._predictor.rows_within(budget, size, self._prompt_depth)
            with_prompts = self._predictor.of_step(with_chunk(size, rows, self._prompt_depth), rows)
            self._known[answers] = self._predictor.per_token(size), with_prompts, rows
        return self._known[answers]

    def _answers(self, n: int) -> StepSize:
        return StepSize(n, n, n * self._depth, n * self._depth)


class _Simulation:
    """A server that advances from one prompt's or answer's end to the next one, not step by step.

    Each answer gets a token in each step. A step without prompts, to which drafts can add tokens, counts as several
    shorter ones. The rows for prompts are shared as in `prompt_order`: all k prompts get an equal part of those of
    every TURNS-th step, and the shortest prompt gets the rest.
    """

    def __init__(self, pace: _Pace, free_slots: int, free_blocks: int) -> None:
        self._pace = pace
        self._free_slots, self._free_blocks = free_slots, float(free_blocks)
        self._shared = 0.0  # the rows that a prompt would have got so far if it had never been the shortest
        self._prompts: list[list[float]] = []  # a heap: rows missing plus `_shared`, tokens of the answer, blocks
        self._answers: list[tuple[float, float]] = []  # a heap: the step in which an answer ends, blocks
        self._step = 0.0
        self.seconds = 0.0

    def make_room(self, load: Load) -> bool:
        """Continue until a request can be admitted. Returns False if it never can."""
        while not self._free_slots or self._free_blocks < load.blocks:
            if not self._prompts and not self._answers:
                return False
            self._advance()
        return True

    def admit(self, load: Load, tokens: float) -> None:
        """Start a request, whose answer will have `tokens` more tokens."""
        self._free_slots -= 1
        self._free_blocks -= load.blocks
        if load.missing:
            heappush(self._prompts, [self._pace.rows(load) + self._shared, tokens, load.blocks])
        else:
            heappush(self._answers, (self._step + tokens, load.blocks))

    def until_first_row(self, load: Load) -> float:
        """Return the seconds until a request that is admitted now runs a row."""
        _, together, rows = self._pace.of(len(self._answers))
        missing = self._pace.rows(load)
        ahead = [prompt[0] - self._shared for prompt in self._prompts]
        return together * min(sum(each for each in ahead if each < missing) // rows, TURNS * len(ahead))

    def _advance(self) -> None:
        """Continue until the next prompt or answer ends."""
        prompts, answers = self._prompts, self._answers
        alone, together, rows = self._pace.of(len(answers))
        passed, prompt_ends = answers[0][0] - self._step if answers else math.inf, False
        if prompts:
            shared, shortest = rows / TURNS / len(prompts), rows - rows / TURNS
            until_prompt_ends = (prompts[0][0] - self._shared) / (shortest + shared)
            prompt_ends = until_prompt_ends <= passed
            passed = min(passed, until_prompt_ends)
            prompts[0][0] -= passed * shortest
            self._shared += passed * shared
        self._step += passed
        self.seconds += passed * (together if prompts else alone)
        if prompt_ends:
            _, tokens, blocks = heappop(prompts)
            heappush(answers, (self._step + tokens, blocks))
        else:
            self._free_blocks += heappop(answers)[1]
            self._free_slots += 1


def predicted_wait(
    new: Load,
    waiting: Sequence[Load],
    running: Sequence[Load],
    *,
    free_slots: int,
    free_blocks: int,
    predictor: StepPredictor,
    lengths: AnswerLengths,
    budget: float,
) -> float:
    """Return the seconds until a new request runs its first row; math.inf if one before it or itself never can.

    waiting      the requests that will be admitted before it, in this order
    free_blocks  blocks that are not reserved, including those of idle prefixes
    budget       the seconds that a step with prompts may take beside running answers; math.inf if unlimited

    Takes a millisecond with 32 running and 256 waiting requests.
    """
    pace = _Pace([*running, *waiting, new], predictor, budget)
    simulation = _Simulation(pace, free_slots + len(running), free_blocks + sum(load.blocks for load in running))
    for index, load in enumerate([*running, *waiting]):
        if not simulation.make_room(load):
            return math.inf
        simulation.admit(load, lengths.remaining(load.limit, load.generated, index * _GOLDEN % 1))
    return simulation.seconds + simulation.until_first_row(new) if simulation.make_room(new) else math.inf


class Outlook:
    """Predicts waits, and learns from the answers that have ended how long answers get."""

    def __init__(self, kv: KVCache, scheduler: Scheduler, max_running: int) -> None:
        self._kv = kv
        self._n_blocks = kv.capacity // kv.block_size
        self._scheduler = scheduler
        self._max_running = max_running
        self._lengths = AnswerLengths()
        self._prompt_tokens = self._computed_tokens = 1

    def observe(self, answer: Answer) -> None:
        """Record a request that has ended."""
        self._prompt_tokens += answer.prompt_tokens
        self._computed_tokens += answer.prompt_tokens - (answer.cached_tokens or 0)
        if answer.ended_by is not FinishReason.CANCELLED:
            self._lengths.observe(answer.limit - answer.prompt_tokens, answer.generated_tokens)

    def wait(self, new: Answer, before: Sequence[Answer], running: Mapping[Answer, Slot]) -> float:
        """Return the seconds until a new request runs its first row, if the requests in `before` are admitted first."""
        answers = [slot for answer, slot in running.items() if not answer.in_prefill]
        depth = sum(len(slot.tokens) for slot in answers)
        loads = [self._load(answer, len(slot.tokens)) for answer, slot in running.items()]
        return predicted_wait(
            self._waiting_load(new),
            [self._waiting_load(answer) for answer in before],
            loads,
            free_slots=self._max_running - len(running),
            free_blocks=self._n_blocks - sum(load.blocks for load in loads),
            predictor=self._scheduler.predictor,
            lengths=self._lengths,
            budget=self._scheduler.budget(StepSize(len(answers), len(answers), depth, depth)),
        )

    def _waiting_load(self, answer: Answer) -> Load:
        """Return the load of a request whose cached prefix is assumed to be as long as an average one."""
        return self._load(answer, int(answer.prompt_tokens * (1 - self._computed_tokens / self._prompt_tokens)))

    def _load(self, answer: Answer, depth: int) -> Load:
        most = answer.limit - answer.prompt_tokens
        length = answer.generated_tokens + self._lengths.remaining(most, answer.generated_tokens, 0.5)
        # Alone, every request that was accepted can finish, so it never needs more than all blocks.
        blocks = min(-(-int(answer.prompt_tokens + length) // self._kv.block_size), self._n_blocks)
        missing = max(0, answer.prompt_tokens - depth)
        return Load(missing, depth, answer.generated_tokens, most, blocks)
