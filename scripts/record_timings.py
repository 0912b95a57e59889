#!/usr/bin/env python3
"""Record how long real turns took: tests/data/bench_timings.json, which the tests of `llmrun bench` replay.

    scripts/record_timings.py MODEL.gguf [--engine llmrun] [--rounds 100] [--threads 2] [--prompt 64] [--tokens 32]

Two processes of one engine take turns on the same file, A B, B A, A B, ...: no true difference lies between them, and
what the recording shows is this machine's noise, the first, cold turns included. Each call adds one session.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.peer_bench import ENGINES, Engine, Workload, closing  # noqa: E402

RECORDING = ROOT / "tests" / "data" / "bench_timings.json"


def record(engine: str, model: Path, workload: Workload, rounds: int) -> dict[str, Any]:
    """Milliseconds of each turn, in the order of the rounds, by process and metric."""
    turns: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in "ab"}
    with contextlib.ExitStack() as stack:
        pair = [(name, stack.enter_context(closing(Engine(engine, model, workload)))) for name in "ab"]
        for number in range(rounds):
            for name, process in pair if number % 2 == 0 else pair[::-1]:
                prefill = process.ask(do="prefill", tokens=workload.prompt)
                decode = process.ask(do="decode", tokens=workload.tokens, depth=workload.depth)
                turns[name]["prefill"].append(round(1000 * prefill, 2))
                turns[name]["decode"].append(round(1000 * decode, 2))
    return {
        "engine": engine,
        "model": model.name,
        "threads": workload.threads,
        "prompt": workload.prompt,
        "tokens": workload.tokens,
        **turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    sessions = json.loads(RECORDING.read_text())["sessions"] if RECORDING.exists() else []
    workload = Workload(options.threads, options.prompt, options.tokens, depth=0)
    sessions.append(record(options.engine, options.model, workload, options.rounds))
    lines = ",\n".join(json.dumps(session) for session in sessions)
    RECORDING.write_text(f'{{"unit": "milliseconds a turn", "sessions": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
