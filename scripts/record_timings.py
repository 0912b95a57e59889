#!/usr/bin/env python3
"""Record the timings of real turns in tests/data/bench_timings.json. The tests of `llmrun bench` replay them.

    scripts/record_timings.py MODEL.gguf [--backend cpu] [--rounds 100] [--threads 2] [--prompt 64] [--tokens 32]

Two processes with the same engine and the same file take turns: A B, B A, A B, and so on. There is no real difference
between the processes, so the recording shows the noise of this machine. Each call adds one session.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llmrun.jobs.bench.measuring.results import samples_of  # noqa: E402
from llmrun.jobs.bench.measuring.runner import Effort, Runner, Trial  # noqa: E402
from llmrun.jobs.bench.measuring.workload import (  # noqa: E402
    BenchTarget,
    configurations,
    synthetic,
)
from scripts.compare_servers import Quiet  # noqa: E402

RECORDING = ROOT / "tests" / "data" / "bench_timings.json"
ENGINES = {"cpu": "llmrun", "llama": "llama.cpp"}  # the names of the backends in the recording


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Run one session and return the times of all turns in milliseconds, by process and metric."""
    targets = [BenchTarget(name, str(options.model), backend=options.backend, threads=options.threads) for name in "ab"]
    sweep = configurations(targets, [synthetic(options.prompt, options.tokens, 0, 1)])
    effort = Effort(seconds=3600.0, repetitions=options.rounds, enough=lambda trials: False)
    trials = Runner(sweep, effort, Quiet()).run().trials
    return {
        "engine": ENGINES[options.backend],
        "model": options.model.name,
        "threads": options.threads,
        "prompt": options.prompt,
        "tokens": options.tokens,
        **{name: milliseconds(trial, options) for name, trial in zip("ab", trials, strict=True)},
    }


def milliseconds(trial: Trial, options: argparse.Namespace) -> dict[str, list[float]]:
    if trial.failure is not None:
        raise trial.failure
    counts = {"prefill": options.prompt, "decode": options.tokens - 1}
    return {
        metric: [round(1000 * count / speed, 2) for speed in samples_of(trial, metric)]
        for metric, count in counts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", choices=ENGINES, default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    sessions = json.loads(RECORDING.read_text())["sessions"] if RECORDING.exists() else []
    sessions.append(record(options))
    lines = ",\n".join(json.dumps(session) for session in sessions)
    RECORDING.write_text(f'{{"unit": "milliseconds a turn", "sessions": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
