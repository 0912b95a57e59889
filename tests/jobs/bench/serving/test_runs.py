"""Tests of whole runs of the serving benchmark on a fake model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmrun.base.errors import ModelNotFound, NetworkError
from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.runs import ServingResult, heading, measure_serving, sentences, times_rows, to_row
from tests.support.bench.serving import Silent
from tests.support.servers.fake_model import FakeModel
from tests.support.servers.hostile_server import response, serving

PLAN = ServingPlan(requests=12, prompt=4, generate=4, concurrency=4, seed=3)


def measured(model: FakeModel, **plan: Any) -> ServingResult:
    with serving(model) as server:
        return measure_serving(replace(PLAN, **plan), server.url, Silent(), offline=True)


def test_a_closed_loop_has_all_figures() -> None:
    found = measured(FakeModel(), limits={"ttft": 100.0})
    figures = found.figures
    assert (found.model, found.lateness, figures.completed, figures.good) == ("tiny", None, 12, 12)
    assert set(figures.times) == {"ttft", "tpot", "itl", "e2e"}
    assert figures.output_tokens == 48
    assert len(times_rows(found)) == 4


def test_an_open_loop_reports_its_lateness() -> None:
    found = measured(FakeModel(), rate=200.0)
    assert found.lateness is not None
    assert found.lateness.count == found.figures.completed == 12


def test_a_duration_limits_the_requests() -> None:
    found = measured(FakeModel(), rate=100.0, requests=None, duration=0.1)
    assert 0 < found.figures.total < 40


def test_rejected_requests_are_counted_apart() -> None:
    found = measured(FakeModel(slots=1, most_waiting=0, prefill_s=0.02), rate=1000.0)
    assert found.figures.rejected > 0
    assert found.figures.completed + found.figures.rejected == 12
    assert found.figures.failed == {}


def test_failures_are_counted_by_kind() -> None:
    """The first request warms up."""
    kinds = ["", "500", "die", "silent die"]
    model = FakeModel(faults=lambda number: kinds[number % 4] if number > 0 else "")
    found = measured(model)
    assert found.figures.completed + sum(found.figures.failed.values()) == 12
    assert set(found.figures.failed) == {"HTTP 500", "connection lost"}
    assert found.messages == {"HTTP 500": "out of memory"}
    assert any("HTTP 500 (out of memory)" in sentence for sentence in sentences(found))


def test_a_run_without_answers_is_an_error() -> None:
    with pytest.raises(NetworkError, match=r"12 of 12 requests failed: tiny @ .*HTTP 500: out of memory"):
        measured(FakeModel(faults=lambda number: "500" if number > 0 else ""))


def test_fields_that_a_server_rejects_are_left_out() -> None:
    model = FakeModel(rejects=("ignore_eos",), counts_tokens=False)
    found = measured(model)
    assert found.figures.completed == 12
    assert all("ignore_eos" not in body for body in model.bodies)
    assert [note.split(" does not ")[1].split(":")[0] for note in found.notes[:2]] == [
        "support ignore_eos",
        "report token counts",
    ]


def test_a_refusal_is_the_usual_error() -> None:
    refusal = response(b'{"error": {"message": "no model tiny"}}', status="404 Not Found", kind="application/json")
    with serving(refusal) as server, pytest.raises(ModelNotFound, match="no model tiny"):
        measure_serving(PLAN, server.url, Silent(), offline=True)


def test_json_has_vllms_names() -> None:
    row = to_row(measured(FakeModel(), limits={"ttft": 100.0}))
    for name in ("request_throughput", "output_throughput", "request_goodput", "median_ttft_ms", "p99_e2el_ms"):
        assert row[name] > 0
    assert row["completed"] == 12
    assert row["goodput_slo_ms"] == {"ttft": 100_000.0}


def test_the_heading_says_how_to_repeat_the_run() -> None:
    found = measured(FakeModel(), rate=500.0)
    assert "open loop at 500 requests/s" in heading(found)
    assert heading(found).endswith("seed 3")
