#!/usr/bin/env python3
"""Measure what a long prompt costs others: the gaps between their tokens, and the steps that a short prompt waits.

A few answers are in progress when a long prompt arrives. While it is read, short prompts arrive one after the other.
With --alone, nothing else runs, and the script prints the sizes and the durations of the prompt's steps.

Example:
    taskset -c 0,1 scripts/measure_long_prompt.py model.gguf -t 2 --long 32000
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmrun.backends.base import OpenOptions
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Event, Finished, PrefillProgress, Request, TextDelta, TokenPrompt
from llmrun.options.sampling_params import SamplingParams

SHORT, SHORT_ANSWER = 24, 8  # tokens
ALONE = 60  # steps before the long prompt arrives


class Gaps:
    """The gaps between the tokens of each request, in seconds."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}
        self.values: list[float] = []

    def take(self, events: Sequence[Event], watched: Sequence[int]) -> None:
        now = time.perf_counter()
        for request_id in {event.request_id for event in events if isinstance(event, TextDelta)} & {*watched}:
            if request_id in self.last:
                self.values.append(now - self.last[request_id])
            self.last[request_id] = now


def main() -> int:
    options = _options()
    room = OpenOptions(
        context_size=options.long + 4096, max_sequences=options.answers + 4, kv_tokens="auto", threads=options.threads
    )
    with Engine.open(Path(options.model), room, speculate=False) as engine:
        ends = dict.fromkeys(engine.tokenizer.end_of_generation, -np.inf)
        rng = np.random.default_rng(options.seed)

        def submit(length: int, limit: int) -> int:
            tokens = rng.integers(0, engine.info.vocabulary_size, length).tolist()
            return engine.submit(Request(TokenPrompt(tokens), limit, sampling=SamplingParams(logit_bias=ends)))

        if options.alone:
            submit(options.long, 1)
            _print_steps(engine)
            return 0
        answers = [submit(SHORT, 4000) for _ in range(options.answers)]
        alone, beside = Gaps(), Gaps()
        for _ in range(ALONE):
            alone.take(engine.step(), answers)
        long = submit(options.long, 1)
        begun, waits = time.perf_counter(), []
        short: int | None = None
        steps, has_begun, is_long_over = 0, False, False
        while not is_long_over:
            if short is None:
                short, steps, has_begun = submit(SHORT, SHORT_ANSWER), 0, False
            events = engine.step()
            steps += 1
            beside.take(events, answers)
            if not has_begun and any(event.request_id == short and isinstance(event, TextDelta) for event in events):
                waits.append(steps)
                has_begun = True
            ended = {event.request_id for event in events if isinstance(event, Finished)}
            short = None if short in ended else short
            is_long_over = long in ended
    print(f"{options.answers} answers alone: ITL p50 {_ms(alone, 50)}, p99 {_ms(alone, 99)}")
    print(
        f"beside a prompt of {options.long:,}: ITL p50 {_ms(beside, 50)}, p99 {_ms(beside, 99)}, max {_ms(beside, 100)}"
    )
    print(f"the long prompt took {time.perf_counter() - begun:.0f} s")
    print(f"{len(waits)} prompts of {SHORT} tokens: first token in step {np.median(waits):.0f}, at most {max(waits)}")
    return 0


def _print_steps(engine: Engine) -> None:
    """Run a prompt, and print the median sizes and durations of its steps for each doubling of the depth."""
    steps: list[tuple[int, int, float]] = []  # depth, rows and seconds
    depth = 0
    while not engine.idle:
        begun = time.perf_counter()
        for event in engine.step():
            if isinstance(event, PrefillProgress):
                steps.append((depth, event.done - depth, time.perf_counter() - begun))
                depth = event.done
    first = 0
    while first < depth:
        end = max(2 * first, 1024)
        _, rows, seconds = zip(*(step for step in steps if first <= step[0] < end), strict=True)
        print(
            f"depth {first:7,} to {min(end, depth):7,}: {np.median(rows):3.0f} rows in {np.median(seconds):.2f} s, "
            f"at most {max(seconds):.2f} s; {sum(rows) / sum(seconds):.0f} tok/s"
        )
        first = end


def _ms(gaps: Gaps, percentile: float) -> str:
    return f"{np.percentile(gaps.values, percentile) * 1e3:.0f} ms"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--long", type=int, default=32_000, help="tokens of the long prompt")
    parser.add_argument("--answers", type=int, default=4, help="answers in progress")
    parser.add_argument("--alone", action="store_true", help="run only the long prompt")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
