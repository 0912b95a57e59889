"""Tests of the requests of a serving benchmark."""

from __future__ import annotations

from dataclasses import replace

from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.runs import request_of

PLAN = ServingPlan(prompt=5, generate=3, seed=1)


def test_requests_depend_only_on_the_seed_and_the_number() -> None:
    assert request_of(PLAN, "tiny", 3) == request_of(PLAN, "tiny", 3)
    assert request_of(PLAN, "tiny", 3).body != request_of(PLAN, "tiny", 4).body
    assert request_of(PLAN, "tiny", 3).body != request_of(replace(PLAN, seed=2), "tiny", 3).body


def test_a_request_has_only_standard_fields_and_ignore_eos() -> None:
    found = request_of(PLAN, "tiny", 0)
    assert set(found.body) == {"model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options"}
    assert found.extras == {"ignore_eos": True}


def test_requests_have_the_lengths_of_the_plan() -> None:
    bodies = [request_of(PLAN, "tiny", number).body for number in range(20)]
    assert [len(str(body["prompt"]).split()) for body in bodies] == [5] * 20
    assert {body["max_tokens"] for body in bodies} == {3}
