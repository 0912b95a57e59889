"""A server that runs random requests step by step, without a model and without a clock.

It schedules like the engine does: requests are admitted in order of arrival when a slot and their blocks are free, and
prompts get the rows that the costs allow.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmrun.engine.costs import LEAST_ROWS, StepCosts, StepSize
from llmrun.engine.scheduling.fairness import prompt_order
from llmrun.engine.scheduling.waits import AnswerLengths, Load, predicted_wait

BLOCK = 32  # tokens


def machine(start: float, cheap_row: float, row: float, cached: float, attended: float) -> Callable[[StepSize], float]:
    """Return the seconds of a step on a machine where rows are cheap while reading the weights takes longer.

    start      to read the weights
    cheap_row  for a row beside others that take less than reading the weights
    row        for a row beside many others
    cached     to read a token in the cache
    attended   for a row to attend to a token
    """

    def seconds(size: StepSize) -> float:
        products = max(start + cheap_row * size.rows, 0.3 * start + row * size.rows)
        return products + cached * size.cached + attended * size.attended

    return seconds


MACHINES = {
    "135M, one thread": machine(8.7e-3, 0.4e-3, 1.15e-3, 1.5e-6, 0.12e-6),
    "8B, 8 threads": machine(0.1, 2e-3, 12e-3, 5e-6, 0.5e-6),
    "compute-bound": machine(10e-3, 9e-3, 10e-3, 0.0, 1e-6),
}


@dataclass(eq=False)
class Job:
    """A request. The server does not know `length`, the length of its answer, before it has ended."""

    prompt: int
    limit: int
    length: int
    missing: int
    generated: int = 0
    last_step: int = 0
    began: float | None = None  # when its first row ran

    @property
    def blocks(self) -> int:
        return math.ceil((self.prompt + self.limit) / BLOCK)

    @property
    def depth(self) -> int:
        return self.prompt - self.missing + self.generated

    @property
    def load(self) -> Load:
        return Load(self.missing, self.depth, self.generated, self.limit, self.blocks)


def random_job(chance: random.Random, *, longest_prompt: int) -> Job:
    prompt = int(math.exp(chance.uniform(math.log(20), math.log(longest_prompt))))
    limit = chance.choice([64, 512, 512, 2048])
    length = min(max(int(chance.lognormvariate(4.2, 0.9)), 1), limit)
    return Job(prompt, limit, length, missing=prompt)


class SimulatedServer:
    """A server whose steps take the seconds of a machine, with noise and now and then a disturbance.

    shares  for each step beside running answers that the budget limited: its seconds without noise, over the budget
    """

    def __init__(
        self, seconds: Callable[[StepSize], float], *, slots: int, blocks: int, budget: float, seed: int
    ) -> None:
        self._seconds, self._budget = seconds, budget
        self._slots, self._free_blocks = slots, blocks
        self._random = random.Random(seed)
        self._steps = 0
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.now = 0.0
        self.costs, self.lengths = StepCosts(), AnswerLengths()
        self.shares: list[float] = []

    def predicted_wait(self, job: Job) -> float:
        """Return the predicted seconds until the first row of a job if it were the last one in the queue."""
        return predicted_wait(
            job.load,
            [each.load for each in self.waiting],
            [each.load for each in self.running],
            free_slots=self._slots - len(self.running),
            free_blocks=self._free_blocks,
            costs=self.costs,
            lengths=self.lengths,
            tokens_per_step=1.0,
            budget=self._budget,
        )

    def step(self) -> None:
        """Run a step. At least one job must be waiting or running."""
        self._steps += 1
        while self.waiting and len(self.running) < self._slots and self.waiting[0].blocks <= self._free_blocks:
            job = self.waiting.popleft()
            job.last_step = self._steps
            self._free_blocks -= job.blocks
            self.running.append(job)
        answers = [job for job in self.running if not job.missing]
        depth = sum(job.depth for job in answers)
        size = StepSize(len(answers), len(answers), depth, depth)
        chunks = dict(self._chunks(size, self._budget if answers else math.inf))
        for job, rows in chunks.items():
            size = size.with_chunk(rows, job.depth)
        seconds = self._seconds(size) * (1 + 0.05 * self._random.expovariate(1.0))
        if self._random.random() < 0.01:
            seconds *= 6
        self.costs.observe(size, sum(chunks.values()), seconds)
        self._take(answers, chunks)
        self.now += seconds

    def _chunks(self, size: StepSize, budget: float) -> Iterator[tuple[Job, int]]:
        prompts = [job for job in self.running if job.missing]
        left, least = 256, LEAST_ROWS
        for index in prompt_order([(job.missing, job.last_step) for job in prompts], self._steps):
            job = prompts[index]
            allowed = min(self.costs.rows_within(budget, size, job.depth, least), left)
            rows = min(job.missing, allowed)
            if not rows:
                return
            size = size.with_chunk(rows, job.depth)
            left -= rows
            if LEAST_ROWS < rows == allowed and left and math.isfinite(budget):
                self.shares.append(self._seconds(size) / budget)
            least = 0
            yield job, rows

    def _take(self, answers: list[Job], chunks: dict[Job, int]) -> None:
        for job, rows in chunks.items():
            job.began = self.now if job.began is None else job.began
            job.missing -= rows
            job.last_step = self._steps
        for job in [*answers, *(job for job in chunks if not job.missing)]:
            job.generated += 1
            if job.generated >= job.length:
                self.running.remove(job)
                self._free_blocks += job.blocks
                self.lengths.observe(job.limit, job.generated)
