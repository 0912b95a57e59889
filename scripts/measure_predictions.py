#!/usr/bin/env python3
"""Measure how well the time to the first token is predicted, with prompts of random lengths.

Half of the prompts run on an idle engine, and the other half beside two other clients, whose requests follow one
another. For each prompt, the script prints the predicted and the actual seconds from the moment of the prediction, and
at the end the median and the 90th percentile of the relative errors. The engine uses and keeps the costs of steps on
disk, as servers do; with --fresh, the first prompt begins without them. With --cpu-time, all times are CPU times of one
thread, so that other programs disturb the result less.

Example:
    taskset -c 0,1 scripts/measure_predictions.py model.gguf -t 2 --prompts 30 --shortest 500 --longest 19000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmrun.backends import run_speeds
from llmrun.backends.base import OpenOptions
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request, TextDelta, TokenPrompt
from llmrun.options.sampling_params import SamplingParams

OTHER_PROMPT, OTHER_ANSWER = (50, 2000), (50, 400)  # tokens; the ranges of the other clients' requests


class Clients:
    """Requests of random tokens to an engine, whose answers do not end before their limits."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = np.random.default_rng(seed)
        self._ends = dict.fromkeys(engine.tokenizer.end_of_generation, -np.inf)
        self._others: set[int] = set()

    def request(self, length: int, limit: int) -> Request:
        tokens = self._random.integers(0, self._engine.info.vocabulary_size, length).tolist()
        return Request(TokenPrompt(tokens), limit, sampling=SamplingParams(logit_bias=self._ends))

    def length(self, shortest: int, longest: int) -> int:
        """Return a random length. Short prompts are as frequent as long ones on a logarithmic scale."""
        return int(np.exp(self._random.uniform(np.log(shortest), np.log(longest))))

    def step(self, others: int) -> tuple[set[int], set[int]]:
        """Run a step beside this many other requests. Return the ids of requests with new tokens and of ended ones."""
        while len(self._others) < others:
            request = self.request(self.length(*OTHER_PROMPT), int(self._random.integers(*OTHER_ANSWER)))
            self._others.add(self._engine.submit(request))
        events = self._engine.step()
        ended = {event.request_id for event in events if isinstance(event, Finished)}
        self._others -= ended
        return {event.request_id for event in events if isinstance(event, TextDelta)}, ended

    def cancel_others(self) -> None:
        for number in self._others:
            self._engine.cancel(number)
        self._others.clear()
        while not self._engine.idle:
            self._engine.step()


def measured(engine: Engine, clients: Clients, length: int, others: int, options: argparse.Namespace) -> float | None:
    """Run a prompt, print its times, and return the relative error, or None if nothing was predicted."""
    began = time.perf_counter()
    while others and time.perf_counter() - began < options.before:
        clients.step(others)
    answer = engine.prepare(clients.request(length, options.answer))
    asked = time.perf_counter()
    predicted = engine.predicted(answer)
    took = time.perf_counter() - asked
    number = engine.enqueue(answer)
    first, has_ended = 0.0, False
    while not has_ended:
        tokens, ended = clients.step(others)
        first = first or (time.perf_counter() - asked if number in tokens else 0.0)
        has_ended = number in ended
    clients.cancel_others()
    engine.forget()
    if predicted.first_token_s is None:
        print(f"{length:6,} tokens beside {others}: nothing predicted, {first:7.2f} s", flush=True)
        return None
    error = predicted.first_token_s / first - 1
    print(
        f"{length:6,} tokens beside {others}: predicted {predicted.first_token_s:7.2f} s in {took * 1e3:.1f} ms, "
        f"actual {first:7.2f} s, {error:+.0%}",
        flush=True,
    )
    return abs(error)


def main() -> int:
    options = _options()
    if options.cpu_time:
        options.threads, time.perf_counter = 1, time.process_time
    if options.fresh:
        run_speeds._path = lambda: Path(tempfile.mkdtemp()) / "runs.json"
    room = OpenOptions(
        context_size=options.longest + 1024,
        max_sequences=4,
        kv_tokens=options.longest + 4 * (OTHER_PROMPT[1] + OTHER_ANSWER[1]),
        threads=options.threads,
    )
    errors: dict[int, list[float]] = {0: [], 2: []}
    with Engine.open(Path(options.model), room, speculate=False) as engine:
        clients = Clients(engine, options.seed)
        for index in range(options.prompts):
            others = 2 * (index % 2)
            error = measured(engine, clients, clients.length(options.shortest, options.longest), others, options)
            if error is not None:
                errors[others].append(error)
    for words, found in (("idle", errors[0]), ("beside two others", errors[2]), ("all", errors[0] + errors[2])):
        if found:
            print(f"{words}: median error {np.median(found):.0%}, 90th percentile {np.percentile(found, 90):.0%}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--shortest", type=int, default=500, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=19_000, help="tokens of the longest prompt")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--before", type=float, default=10.0, help="seconds for which the others run before a prompt")
    parser.add_argument("--fresh", action="store_true", help="begin without the costs of earlier runs")
    parser.add_argument("--cpu-time", action="store_true", help="count the CPU time of one thread")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
