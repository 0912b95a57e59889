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

from llmrun.engine.costs import MOST_ROWS, StepCosts, StepSize
from llmrun.engine.scheduling.fairness import prompt_order
from llmrun.engine.scheduling.scheduler import ChunkRule
from llmrun.engine.scheduling.waits import AnswerLengths, Load, Prediction, Simulation

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
    first_token: float | None = None  # when its prompt was complete

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
    """A server whose steps take as long as those of a real machine, with noise and occasional disturbances."""

    def __init__(self, seconds: Callable[[StepSize], float], *, slots: int, blocks: int, seed: int) -> None:
        self._seconds = seconds
        self._slots, self._free_blocks = slots, blocks
        self._random = random.Random(seed)
        self._steps = 0
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.now = 0.0
        self.costs, self.lengths = StepCosts(), AnswerLengths()
        self._rule = ChunkRule(self.costs, MOST_ROWS, by_seconds=True)

    def predicted(self, job: Job) -> Prediction:
        """Return the predicted times of a job if it were the last one in the queue."""
        loads = [each.load for each in [*self.running, *self.waiting, job]]
        simulation = Simulation(
            loads[: len(self.running)],
            loads[len(self.running) :],
            free_slots=self._slots - len(self.running),
            free_blocks=self._free_blocks,
            rule=self._rule,
            lengths=self.lengths,
            tokens_per_step=1.0,
        )
        index = len(loads) - 1
        simulation.run([index])
        return Prediction(simulation.admitted[index], simulation.first_tokens[index])

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
        chunks = dict(self._chunks(size))
        for job, rows in chunks.items():
            size = size.with_chunk(rows, job.depth)
        seconds = self._seconds(size) * (1 + 0.05 * self._random.expovariate(1.0))
        if self._random.random() < 0.01:
            seconds *= 6
        self.costs.observe(size, sum(chunks.values()), seconds)
        self._take(answers, chunks, seconds)
        self.now += seconds

    def _chunks(self, size: StepSize) -> Iterator[tuple[Job, int]]:
        prompts = [job for job in self.running if job.missing]
        left, least, beside_answers, is_single = MOST_ROWS - size.rows, 1, size.answers > 0, len(prompts) == 1
        seconds = self._rule.seconds(size, is_alone=is_single and not self.waiting)
        for index in prompt_order([(job.missing, job.last_step) for job in prompts], self._steps):
            job = prompts[index]
            rows = self._rule.rows(
                min(job.missing, left),
                seconds,
                size,
                job.depth,
                least,
                beside_answers=beside_answers,
                is_single=is_single,
            )
            if rows < 1:
                return
            size, left, least = size.with_chunk(rows, job.depth), left - rows, 0
            yield job, rows

    def _take(self, answers: list[Job], chunks: dict[Job, int], seconds: float) -> None:
        for job, rows in chunks.items():
            job.began = self.now if job.began is None else job.began
            job.missing -= rows
            job.last_step = self._steps
        for job in [*answers, *(job for job in chunks if not job.missing)]:
            job.first_token = self.now + seconds if job.first_token is None else job.first_token
            job.generated += 1
            if job.generated >= job.length:
                self.running.remove(job)
                self._free_blocks += job.blocks
                self.lengths.observe(job.limit, job.generated)
