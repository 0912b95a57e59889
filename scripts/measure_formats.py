#!/usr/bin/env python3
"""Measure how fast JSON with a schema is generated, and how long computing its masks takes.

    scripts/measure_formats.py MODEL                  a GGUF file
    scripts/measure_formats.py MODEL --rounds 9 --threads 2

In each round, every prompt is answered in JSON, with and without speculation, and freely with the same number of
tokens, without speculation. The printed ratios compare decode speeds. The first round is a warm-up.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from msgspec import structs  # noqa: E402

from llmrun.backends.base import OpenOptions  # noqa: E402
from llmrun.engine.constraint import answer as constrained  # noqa: E402
from llmrun.engine.constraint.base import FormatKind, ResponseFormat  # noqa: E402
from llmrun.engine.engine import Engine  # noqa: E402
from llmrun.engine.requests import ChatPrompt, Finished, Request, TextDelta, TextPrompt  # noqa: E402
from llmrun.options.sampling_params import SamplingParams  # noqa: E402


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 40}
AGE = {"type": "integer", "minimum": 0, "maximum": 120}
COUNT = {"type": "integer", "minimum": 1, "maximum": 99999}
PERSON = record(name=TEXT, age=AGE, city=TEXT, occupation={"enum": ["nurse", "teacher", "chemist", "baker", "other"]})
FACTS = (
    "Anna Berg, 31, is a nurse in Oslo. Tom Hill, 45, is a teacher in Leeds. Maria Rossi, 28, works as a chemist in "
    "Turin. John Smith, 52, is a baker in Dover."
)
INVOICE = record(
    invoice_number=TEXT,
    customer_name=TEXT,
    currency={"enum": ["EUR", "USD", "GBP"]},
    line_items={
        "type": "array",
        "items": record(description=TEXT, quantity=COUNT, unit_price_cents=COUNT),
        "minItems": 3,
        "maxItems": 3,
    },
    is_paid={"type": "boolean"},
)
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "people": (
        f"Extract name, age, city and occupation of each person as JSON. {FACTS}",
        record(people={"type": "array", "items": PERSON, "minItems": 4, "maxItems": 4}),
    ),
    "invoice": (
        "Write this invoice as JSON. Invoice 2024-118 to Miller Ltd in euros: 3 desks at 199.00, 12 chairs at 49.50 "
        "and 1 lamp at 25.00. Not paid yet.",
        INVOICE,
    ),
    "sentiment": (
        "Classify the review as JSON. The battery lasts two days, but the screen scratches easily and the shop was "
        "rude.",
        record(
            overall_sentiment={"enum": ["positive", "negative", "mixed"]},
            aspects={
                "type": "array",
                "items": record(aspect=TEXT, sentiment={"enum": ["positive", "negative"]}, evidence=TEXT),
                "minItems": 3,
                "maxItems": 3,
            },
            would_buy_again={"type": "boolean"},
        ),
    ),
}


@contextmanager
def timed_masks(times: list[float]) -> Iterator[None]:
    """Record how long each mask takes, in seconds."""
    masks = constrained.AnswerConstraint.masks

    def timed(self: constrained.AnswerConstraint, draft: Any) -> Any:
        started = time.perf_counter()
        try:
            return masks(self, draft)
        finally:
            times.append((time.perf_counter() - started) / (1 + len(draft)))

    constrained.AnswerConstraint.masks = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        constrained.AnswerConstraint.masks = masks  # type: ignore[method-assign]


def answered(engine: Engine, request: Request) -> tuple[str, Finished]:
    """Answer a request with an empty cache."""
    engine.forget()
    text = ""
    for event in engine.generate(request):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finished):
            return text, event
    raise AssertionError("no last event")


class Measured:
    """The results of all rounds: decode speeds by prompt and kind, and times in seconds."""

    def __init__(self) -> None:
        self.speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.mask_times: list[float] = []
        self.new_schema: list[float] = []
        self.steps: dict[str, float] = {}

    def run(self, name: str, plain: Engine, speculating: Engine, sampling: SamplingParams, number: int) -> None:
        """Answer one prompt freely, in JSON, and in JSON with speculation."""
        question, schema = TASKS[name]
        prompt = ChatPrompt([{"role": "user", "content": question}]) if plain.takes_chats else TextPrompt(question)
        new = {**schema, "title": f"round {number}"}  # a schema that has not been compiled
        wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(new))
        request = Request(prompt, 500, sampling=sampling, response_format=wanted)
        _, warm = answered(plain, structs.replace(request, max_tokens=1, response_format=None))
        _, first = answered(plain, structs.replace(request, max_tokens=1))
        self.new_schema.append(first.timings.ttft_s - warm.timings.ttft_s)
        with timed_masks(self.mask_times):
            text, shaped = answered(plain, request)
        same, drafted = answered(speculating, request)
        assert text == same, "speculation changed an answer"
        json.loads(text)
        n = shaped.timings.generated_tokens
        _, free = answered(plain, Request(prompt, n, sampling=without_end(plain, sampling)))
        for kind, finished in (("free", free), ("format", shaped), ("format and drafts", drafted)):
            self.speeds[name, kind].append(finished.timings.decode_per_second)
        self.steps[name] = shaped.timings.tokens_per_step

    def ratios(self, name: str, kind: str) -> list[float]:
        """Return the ratios to free text, without those of the warm-up."""
        return [
            one / free for one, free in zip(self.speeds[name, kind][1:], self.speeds[name, "free"][1:], strict=True)
        ]


def without_end(engine: Engine, sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with all end-of-generation tokens banned."""
    return replace(sampling, logit_bias=dict.fromkeys(engine.tokenizer.end_of_generation, -math.inf))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temp", type=float, default=0.0)
    arguments = parser.parse_args()
    options = OpenOptions(backend="cpu", context_size=2048, threads=arguments.threads)
    sampling = SamplingParams(temperature=arguments.temp, seed=1)
    measured = Measured()
    with (
        Engine.open(arguments.model, options, speculate=False, will_constrain=True) as plain,
        Engine.open(arguments.model, options, will_constrain=True) as speculating,
    ):
        for number in range(arguments.rounds + 1):
            for name in TASKS:
                measured.run(name, plain, speculating, sampling, number)
    for name in TASKS:
        for kind in ("format", "format and drafts"):
            ratios = measured.ratios(name, kind)
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{name:<10} {kind:<18} {statistics.median(ratios):.2f} times free text ({shown})")
        print(f"{name:<10} {measured.steps[name]:.2f} tokens per step without drafts")
    masks = [1e6 * seconds for seconds in measured.mask_times]
    print(f"masks: median {statistics.median(masks):.0f} us, p99 {percentile(masks, 0.99):.0f} us, n {len(masks)}")
    delays = [1e3 * seconds for seconds in measured.new_schema[len(TASKS) :]]
    print(f"a new schema delays the first token by {statistics.median(delays):.1f} ms ({max(delays):.1f} at most)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
