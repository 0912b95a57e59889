#!/usr/bin/env python3
"""The CPU engine beside llama.cpp on the same file: prefill and decode in turns, and each as a share of the limit.

    scripts/peer_bench.py [MODEL.gguf ...] [--threads 2] [--rounds 5] [--prompt 256] [--tokens 32] [--depth 0]

Without a model it takes smollm2:135m; scripts/make_models.py writes larger ones. Each engine lives in a process of its
own, so that peak memory is its own; they take turns, and what counts is the median of the rounds' ratios. Decode is
without sampling, as llama-bench counts it, and stands beside the memory bandwidth of the same rounds; prefill beside
the most integer products this processor makes. --first-run also compiles every kernel anew. LLMRUN_CPU_LEVEL and
LLAMA_CPP_LIB_PATH compare other builds. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.rounds import compared  # noqa: E402

ENGINES = ("llmrun", "llama.cpp")


@dataclass(frozen=True)
class Workload:
    """What is asked of both engines."""

    threads: int
    prompt: int
    tokens: int
    depth: int

    @property
    def context(self) -> int:
        return max(self.prompt, self.depth + self.tokens) + 64


class Engine:
    """An engine in a process of its own (tests/support/peer_engine.py), which answers one line of JSON with one."""

    def __init__(self, name: str, model: Path, workload: Workload, environment: dict[str, str] | None = None) -> None:
        self.name = name
        command = [sys.executable, "-m", "tests.support.peer_engine", name, str(model)]
        command += [str(workload.threads), str(workload.context)]
        environment = {**os.environ, **(environment or {}), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.facts: dict[str, Any] = self._answer()

    def ask(self, **question: int | str) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> float:
        """End it; returns the peak of its memory, in bytes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak = float(self._answer()["peak_bytes"])
        self._process.wait()
        return peak

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Rounds:
    """Speeds of each round, by engine, and the machine's limits in the same round."""

    prefill: dict[str, list[float]]
    decode: dict[str, list[float]]
    bandwidth: list[float]
    products: list[float]


def measured(engines: list[Engine], workload: Workload, rounds: int) -> Rounds:
    from llmrun.kernels.machine import Machine

    machine = Machine(workload.threads)
    found = Rounds({name: [] for name in ENGINES}, {name: [] for name in ENGINES}, [], [])
    for number in range(-1, rounds):
        found.bandwidth.append(machine.read_bandwidth())
        found.products.append(machine.multiply_rate())
        for engine in engines:
            prefill = workload.prompt / engine.ask(do="prefill", tokens=workload.prompt)
            decode = workload.tokens / engine.ask(do="decode", tokens=workload.tokens, depth=workload.depth)
            if number >= 0:  # the first round warms up
                found.prefill[engine.name].append(prefill)
                found.decode[engine.name].append(decode)
    return found


def compare(model: Path, workload: Workload, rounds: int) -> None:
    engines = [Engine(name, model, workload) for name in ENGINES]
    found = measured(engines, workload, rounds)
    facts = engines[0].facts
    bandwidth, products = statistics.median(found.bandwidth), max(found.products)
    print(f"{model.name}, {workload.threads} threads, {rounds} alternating rounds, {facts['device']}")
    print(
        f"  this machine reads {bandwidth / 1e9:.1f} GB/s ({min(found.bandwidth) / 1e9:.1f} to"
        f" {max(found.bandwidth) / 1e9:.1f}) and makes at most {products / 1e9:.0f} G products/s"
    )
    depth = f"@{workload.depth}" if workload.depth else ""
    for label, speeds, cost, limit in (
        (f"pp{workload.prompt}", found.prefill, facts["products_a_token"], products),
        (f"tg{workload.tokens}{depth}", found.decode, facts["bytes_a_token"], bandwidth),
    ):
        print("  " + compared(label, *((name, speeds[name]) for name in ENGINES)))
        shares = (f"{name} {statistics.median(speeds[name]) * cost / limit:.0%}" for name in ENGINES)
        print(f"  {'':8}  of the limit: {', '.join(shares)}")
    loads = ", ".join(f"{engine.name} {engine.facts['load_seconds']:.2f} s" for engine in engines)
    peaks = ", ".join(f"{engine.name} {engine.close() / 1e6:.0f} MB" for engine in engines)
    print(f"  loaded in {loads}; peak memory {peaks} (the file {model.stat().st_size / 1e6:.0f} MB)")


def first_run(model: Path, workload: Workload) -> None:
    """Load with no kernel compiled, and again."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for _ in range(2):
            with closing(Engine(ENGINES[0], model, workload, {"LLMRUN_CACHE_DIR": folder})) as engine:
                seconds.append(engine.facts["load_seconds"])
    print(f"  a first run compiles and loads in {seconds[0]:.1f} s, the second loads in {seconds[1]:.2f} s")


@contextlib.contextmanager
def closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--depth", type=int, default=0, help="tokens before those that are decoded")
    parser.add_argument("--first-run", action="store_true", help="also compile every kernel")
    options = parser.parse_args()
    from llmrun.hub.reporter import Silent
    from llmrun.hub.resolve import resolve

    workload = Workload(options.threads, options.prompt, options.tokens, options.depth)
    for name in options.models or ["smollm2:135m"]:
        model = resolve(name, offline=False, reporter=Silent()).path
        started = time.perf_counter()
        compare(model, workload, options.rounds)
        if options.first_run:
            first_run(model, workload)
        print(f"  ({time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
