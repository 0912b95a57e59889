#!/usr/bin/env python3
"""Compare two servers under the same load, in alternating rounds.

Each round starts one server, measures a closed loop of clients as `llmrun bench --concurrency` does, stops it, and does
the same with the other server. Both get the same prompts. {port} in a command is replaced by a free port.

Example:
    scripts/compare_servers.py "llmrun serve m.gguf --port {port}" \\
        "llama-server -m m.gguf -np 16 -c 32768 --port {port}"
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmrun.base.amounts import format_number, format_seconds
from llmrun.base.errors import LlmrunError, NetworkError
from llmrun.engine.remote.client import RemoteModel
from llmrun.engine.remote.request import parse_endpoint
from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.runs import measure_serving, warm_up
from llmrun.jobs.bench.statistics import MINIMUM_ROUNDS, Interval, paired_ratio

START_S = 600.0
STOP_S = 30.0


@dataclass(frozen=True)
class Metric:
    words: str
    is_speed: bool


METRICS = {
    "output_tok_s": Metric("output tok/s", True),
    "ttft_p50": Metric("TTFT p50", False),
    "ttft_p99": Metric("TTFT p99", False),
    "itl_p99": Metric("ITL p99", False),
}


class Quiet:
    """A reporter that prints only notes."""

    def progress(self, words: str, share: float | None = None) -> None:
        pass

    def watch(self, tell: object) -> None:
        pass

    def note(self, words: str) -> None:
        print(f"note: {words}", file=sys.stderr)


def main() -> int:
    options = _options()
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    plan = {"requests": options.requests, "concurrency": options.clients, "prompt": options.prompt}
    for number in range(options.rounds):
        seeded = ServingPlan(generate=options.generate, seed=options.seed + number, **plan)
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            with serving(options.servers[side]) as url:
                values = measured(seeded, url)
            found[side].append(values)
            words = ", ".join(f"{METRICS[name].words} {_shown(name, value)}" for name, value in values.items())
            print(f"round {number + 1}, {'AB'[side]}: {words}", flush=True)
    report(found)
    return 0


def measured(plan: ServingPlan, url: str) -> dict[str, float]:
    """Measure one server. Raises NetworkError if a request fails, because the loads would then differ."""
    figures = measure_serving(plan, url, Quiet(), offline=True).figures
    if figures.completed < figures.total:
        raise NetworkError(f"{figures.total - figures.completed} requests failed: {dict(figures.failed)}")
    ttft, itl = figures.times["ttft"], figures.times["itl"]
    return {
        "output_tok_s": figures.per_second(figures.output_tokens),
        "ttft_p50": ttft.p50,
        "ttft_p99": ttft.p99,
        "itl_p99": itl.p99,
    }


@contextlib.contextmanager
def serving(command: str) -> Iterator[str]:
    """Start a server, wait until it answers, and stop it afterwards. Yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = shlex.split(command.replace("{port}", str(port)))
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _wait_until_it_answers(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            model = RemoteModel.open(parse_endpoint(url), offline=True)
            with contextlib.closing(model):
                warm_up(model, ServingPlan(prompt=4, generate=4))
            return
        except LlmrunError:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}: {url}") from None
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def report(found: Sequence[Sequence[dict[str, float]]]) -> None:
    """Print the ratio of each metric with its 99 % interval. A ratio above 1 means that A is better."""
    print("\nA compared with B (above 1: A is better)")
    for name, metric in METRICS.items():
        one, other = ([values[name] for values in side] for side in found)
        interval = paired_ratio(one, other, is_speed=metric.is_speed)
        print(f"  {metric.words}: {_interval_words(interval)}")


def _interval_words(interval: Interval) -> str:
    if not math.isfinite(interval.high):
        return f"{interval.ratio:.2f} (no interval: {MINIMUM_ROUNDS} rounds are needed)"
    return f"{interval.ratio:.2f} (99%: {interval.low:.2f} to {interval.high:.2f})"


def _shown(name: str, value: float) -> str:
    return format_number(value) if METRICS[name].is_speed else format_seconds(value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs=2, metavar="COMMAND", help="a server's command line with {port}")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64, help="requests per round")
    parser.add_argument("-p", "--prompt", type=int, default=256, help="words of a prompt")
    parser.add_argument("-n", "--generate", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
