"""Predicts how long a new request would wait, from the state of the queue and of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmrun.base.types import FinishReason
from llmrun.engine.drafting.costs import StepSize
from llmrun.engine.scheduling.waits import AnswerLengths, Load, predicted_wait

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.answer import Answer
    from llmrun.engine.scheduling.scheduler import Scheduler
    from llmrun.engine.slots import Slot


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
