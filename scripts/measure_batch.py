#!/usr/bin/env python3
"""Measure what a batch gains over one request at a time, and how many rows of prompts it computes.

Every round runs `llmrun batch` on new prompts with one answer at a time, and with 16 at a time, in turn. One at a time
gets every eighth prompt. The seconds are those that the command reports, which begin when the model is open. Then the
prompts get a common prefix, and the rows that were computed are compared with the unique tokens of all prompts.

Example:
    scripts/measure_batch.py model.gguf -t 2 --rounds 6
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmrun.backends.base import OpenOptions
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request
from llmrun.jobs.bench.statistics import paired_ratio
from tests.support.batching.batch_runs import batch, openai_line, write_lines

WORDS = "river stone window yellow engine quiet market seven garden letter winter bridge apple doctor".split()  # noqa: SIM905


def main() -> int:
    options = _options()
    speeds: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.rounds):
            lines = _lines(options.lines, seed=number, prefix="", answer=options.answer)
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                some = lines[:: options.parallel // 2] if side == 0 else lines  # about as many seconds for each
                body = _run(folder, some, options, parallel=(1, options.parallel)[side])
                speeds[side].append(body["generated_tokens"] / body["seconds"])
            print(f"round {number}: {speeds[0][-1]:.1f} and {speeds[1][-1]:.1f} tok/s", flush=True)
        ratio = paired_ratio(speeds[1], speeds[0], is_speed=True)
        print(f"{options.parallel} at a time / one: {ratio.ratio:.2f} (99%: {ratio.low:.2f} to {ratio.high:.2f})")
        lines = _lines(options.lines, seed=99, prefix=" ".join(WORDS * 20), answer=8)
        body = _run(folder, lines, options, parallel=options.parallel)
        unique = _unique_tokens(Path(options.model), lines)
        rows = body["prompt_tokens"] - body["cached_tokens"]
        print(f"rows computed / unique tokens: {rows:,} / {unique:,} = {rows / unique:.4f}")
        print(f"tokens of all prompts: {body['prompt_tokens']:,}")
    return 0


def _lines(count: int, *, seed: int, prefix: str, answer: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        text = f"{draw.randrange(10**6)}: write a story about {' '.join(draw.choices(WORDS, k=8))}."
        messages = [{"role": "system", "content": prefix}] if prefix else []
        messages.append({"role": "user", "content": text})
        lines.append(openai_line(str(number), {"messages": messages, "max_tokens": answer}))
    return lines


def _run(folder: Path, lines: Sequence[Any], options: argparse.Namespace, *, parallel: int) -> Mapping[str, Any]:
    source, output = write_lines(folder / "in.jsonl", lines), folder / "out.jsonl"
    arguments = [
        "-m",
        options.model,
        "--parallel",
        str(parallel),
        "--json",
        "--force",
        "--speculate",
        options.speculate,
    ]
    if options.threads:
        arguments += ["-t", str(options.threads)]
    done = batch(source, "-o", output, *arguments)
    body: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == body["failed"] == 0, done.stderr.decode()
    return body


def _unique_tokens(model: Path, lines: Sequence[Mapping[str, Any]]) -> int:
    """Count the nodes of the tree of all prompts' tokens."""
    nodes: set[tuple[int, ...]] = set()
    with Engine.open(model, OpenOptions()) as engine:
        for line in lines:
            tokens = engine._prompts.read(Request(ChatPrompt(line["body"]["messages"]))).tokens
            nodes.update(tuple(tokens[:size]) for size in range(1, len(tokens) + 1))
    return len(nodes)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--lines", type=int, default=256)
    parser.add_argument("--answer", type=int, default=256, help="the most tokens of an answer")
    parser.add_argument("--speculate", default="auto", help="auto or off")
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
