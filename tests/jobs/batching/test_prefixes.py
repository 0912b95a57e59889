"""Tests that a batch computes common prefixes once, with the scripted backend in a real child process."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.engine.child.messages import Open
from llmrun.jobs.batching.requests import CallOptions
from llmrun.jobs.batching.run import Batch, run_batch
from llmrun.jobs.batching.workers.local import LocalWorker
from tests.support.batching.batch_runs import openai_line, write_lines
from tests.support.batching.fake_workers import Told

pytestmark = pytest.mark.push

MOST_ROWS = 1.02  # times the tokens that differ


def unique_tokens(prompts: list[str]) -> int:
    """Count the nodes of the tree of all prompts, whose tokens are bytes."""
    in_order = sorted({prompt.encode() for prompt in prompts})
    common = [
        next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in itertools.pairwise(in_order)
    ]
    return sum(map(len, in_order)) - sum(common)


@pytest.mark.parametrize("parallel", [1, 16])
def test_rows_of_prompts_are_computed_once(tmp_path: Path, parallel: int) -> None:
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefgh ", k=600)) for _ in range(4)]
    prompts = [f"{draw.choice(texts)}{''.join(draw.choices('xyz', k=30))}" for _ in range(200)]
    lines = [
        openai_line(str(number), {"prompt": prompt, "max_tokens": 4}, "/v1/completions")
        for number, prompt in enumerate(prompts)
    ]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({}))
    options = OpenOptions(backend="scripted", max_sequences=parallel, cached_prefixes=64)
    model = Open(str(script), "a-model", options.portable(), speculate=False)
    worker = LocalWorker(model, loading=lambda *_: None, note=lambda _: None, detail=lambda _: None)
    batch = Batch(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", CallOptions())
    tally = asyncio.run(run_batch(batch, [worker], Told(), asyncio.Event())).tally
    assert tally.done == 200
    assert tally.failed == 0
    computed = tally.prompt_tokens - tally.cached_tokens
    assert computed <= MOST_ROWS * unique_tokens(prompts) + len({*prompts})  # the last token is computed for its logits
