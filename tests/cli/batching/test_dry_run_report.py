"""Tests of the report of a prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.cli.batching.dry_run import Comparison, report_json, report_lines
from llmrun.jobs.batching.estimate.counting import Counts
from llmrun.jobs.batching.estimate.estimating import ApiPrice, Estimate, estimate_of
from llmrun.jobs.batching.estimate.sampling import CutAnswer, Sample, Step


def estimate(calls: int = 30_000, joules: float | None = None, **changed: Any) -> Estimate:
    """Return an estimate of answers with 100 tokens, from 40 steps of 50 ms with 16 answers."""
    counts = Counts(lines=calls, calls=calls, prompt_tokens=calls, billed_tokens=calls, most_generated=200 * calls)
    counts.prefixes.total, counts.prefixes.computed = calls, calls // 4
    steps = [Step(0.05, 0, 16, 16) for _ in range(40)]
    sample = Sample(steps, slice(0, 40), [100] * 20, [], 16, "RAPL package" if joules else "", joules)
    return estimate_of(counts, replace(sample, **changed), 16, 2.0)


def report(of: Estimate, **comparison: Any) -> dict[str, str]:
    """Return the words of the report by their labels."""
    lines = report_lines(of, Comparison(**comparison))
    places = {line.index(line[10:].lstrip()) for line in lines if line}
    assert len(places) == 1  # all words begin in the same column
    (place,) = places
    return {line[:place].strip(): line[place:] for line in lines if line}


def test_long_times_are_in_hours() -> None:
    assert report(estimate())["time"] == "2.60 hours"
    assert report(estimate(400))["time"] == "2 min 07 s"


def test_energy_is_predicted_where_it_is_counted() -> None:
    """Two seconds took 100 J, so the machine needs 50 W for 9,384 s."""
    words = report(estimate(joules=100.0), machines=2)
    assert words["energy"] == "0.130 kWh, 50.0 W by RAPL package"
    body = report_json(estimate(joules=100.0), Comparison(machines=2))
    assert body["energy"]["joules"]["estimate"] == pytest.approx(50 * body["seconds"]["estimate"])
    both = body["machines"]
    assert both["energy"]["joules"]["estimate"] == pytest.approx(2 * 50 * both["seconds"]["estimate"])
    assert both["seconds"]["estimate"] == pytest.approx(2 + (body["seconds"]["estimate"] - 2) / 2)


def test_missing_counters_are_mentioned() -> None:
    assert report(estimate())["energy"] == "unknown (no RAPL or NVML counter can be read)"
    assert report_json(estimate(), Comparison())["energy"] is None


def test_samples_say_what_they_have() -> None:
    words = report(estimate(cut=[CutAnswer(50, 200)]))
    assert words["sample"] == "21 of 30,000 requests answered in 2.00 s, 16 at a time, 1 of them only in part"
    assert words["speed"] == "320 generated tok/s"
    assert words["answers"] == "102 tokens on average (92.7 to 115)"
    assert words["prompts"] == "30,000 tokens, 75% in shared prefixes"


def test_a_sample_of_one_has_only_the_limits_of_the_answers() -> None:
    body = report_json(estimate(finished=[100]), Comparison())
    assert body["generated_tokens_per_call"] == pytest.approx({"estimate": 100, "low": 1 / 300, "high": 200})
    assert body["generated_tokens"] == {"estimate": 3_000_000, "low": 100, "high": 6_000_000}


def test_prices_have_an_interval() -> None:
    words = report(estimate(), price=ApiPrice(1.0, 2.0))
    assert words["API price"] == "6.03, of which 0.030 for prompts"


def test_a_model_that_generates_nothing_is_an_error() -> None:
    with pytest.raises(LlmrunError, match="no token was generated within 2 s"):
        estimate(finished=[], cut=[CutAnswer(0, 10)])
