#!/usr/bin/env python3
"""Measure what HTTP and the engine's process cost: the same requests in this process and to `llmrun serve`, in turn.

Both sides get the same prompts and run the same number of requests at a time. The ratios are those of throughput; TTFT
is measured with one request at a time.

Example:
    taskset -c 0,1 scripts/measure_serve_cost.py model.gguf -t 2
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmrun.backends.base import OpenOptions
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request, TextPrompt
from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.runs import measure_serving, request_of
from llmrun.jobs.bench.statistics import paired_ratio
from llmrun.options.sampling_params import SamplingParams
from scripts.compare_servers import Quiet, serving


def main() -> int:
    options = _options()
    command = f"{sys.executable} -m llmrun serve {options.model} --port {{port}} --quiet --parallel {options.clients}"
    if options.threads:
        command += f" -t {options.threads}"
    speeds: tuple[list[float], list[float]] = ([], [])
    firsts: tuple[list[float], list[float]] = ([], [])
    room = OpenOptions(max_sequences=options.clients, kv_tokens="auto", cached_prefixes=16, threads=options.threads)
    with serving(command) as url, Engine.open(Path(options.model), room) as engine:
        for number in range(options.rounds + 1):
            sizes = {"prompt": options.prompt, "generate": options.generate}
            seed = options.seed + 2 * number
            many = ServingPlan(concurrency=options.clients, requests=options.requests, seed=seed, **sizes)
            one = ServingPlan(concurrency=1, requests=8, seed=seed + 1, **sizes)  # no prompt is cached
            sides = [lambda plan: in_process(engine, plan), lambda plan: over_http(url, plan)]
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                speed, _ = sides[side](many)
                _, first = sides[side](one)
                if number:  # the first round warms both sides up
                    speeds[side].append(speed)
                    firsts[side].append(first)
                words = "in process" if side == 0 else "over HTTP"
                print(f"round {number}, {words}: {speed:.1f} tok/s, TTFT {first * 1e3:.1f} ms", flush=True)
    ratio = paired_ratio(speeds[1], speeds[0], is_speed=True)
    added = np.array(firsts[1]) - np.array(firsts[0])
    print(f"throughput over HTTP / in process: {ratio.ratio:.3f} (99%: {ratio.low:.3f} to {ratio.high:.3f})")
    print(f"added TTFT: median {np.median(added) * 1e3:.1f} ms (all: {', '.join(f'{x * 1e3:.1f}' for x in added)})")
    return 0


def over_http(url: str, plan: ServingPlan) -> tuple[float, float]:
    """Return the output tokens per second and the median TTFT in seconds."""
    figures = measure_serving(plan, url, Quiet(), offline=True).figures
    assert figures.completed == figures.total, figures.failed
    return figures.per_second(figures.output_tokens), figures.times["ttft"].p50


def in_process(engine: Engine, plan: ServingPlan) -> tuple[float, float]:
    """Return the output tokens per second and the median TTFT in seconds of the same requests."""
    prompts = iter([str(request_of(plan, "", index).body["prompt"]) for index in range(plan.requests or 0)])
    ends = dict.fromkeys(engine.tokenizer.end_of_generation, -np.inf)
    sampling = SamplingParams(temperature=0, logit_bias=ends)

    def submit(texts: Iterator[str]) -> int:
        text = next(texts, None)
        return 0 if text is None else 1 + engine.submit(Request(TextPrompt(text), plan.generate, sampling=sampling))

    tokens, firsts, started = 0, [], time.perf_counter()
    for _ in range(plan.concurrency):
        submit(prompts)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Finished):
                tokens += event.timings.generated_tokens
                firsts.append(event.timings.ttft_s)
                submit(prompts)
    return tokens / (time.perf_counter() - started), float(np.median(firsts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64, help="requests per round")
    parser.add_argument("-p", "--prompt", type=int, default=64, help="words of a prompt")
    parser.add_argument("-n", "--generate", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
