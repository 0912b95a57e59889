"""Tests of percentiles, throughput and goodput, with the definitions of vLLM."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.remote.stream import Usage
from llmrun.jobs.bench.serving.record import figures, request_times, spread
from tests.support.bench.serving import record


def test_times_count_from_when_the_request_was_due() -> None:
    times = request_times(record(2.0, (3.0, 3.5, 4.5), usage=Usage(5, 0, 4)))
    assert times["ttft"] == 1.0
    assert times["e2e"] == 2.5
    assert times["tpot"] == 0.5  # 1.5 s for the 3 tokens after the first
    assert times["itl"] == pytest.approx(np.percentile([0.5, 1.0], 99))


def test_without_counts_pieces_are_tokens() -> None:
    assert request_times(record(0.0, (1.0, 1.5, 3.0)))["tpot"] == 1.0


def test_one_token_has_no_time_per_token() -> None:
    assert set(request_times(record(0.0, (1.0,)))) == {"ttft", "e2e"}


def test_every_request_is_counted_once() -> None:
    records = [
        record(0.0, (1.0, 2.0), usage=Usage(10, 4, 2)),
        record(1.0, (4.0, 4.1), usage=Usage(10, 0, 2)),
        record(problem="HTTP 500"),
        record(problem="connection lost"),
        record(problem="HTTP 429"),
    ]
    found = figures(records, {"ttft": 1.5})
    assert (found.completed, found.rejected, found.total) == (2, 1, 5)
    assert found.failed == {"HTTP 500": 1, "connection lost": 1}
    assert found.good == 1
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (20, 4, 4)
    assert found.per_second(found.output_tokens) == pytest.approx(4 / 4.1)
    assert found.times["ttft"].count == 2
    assert found.times["ttft"].p50 == 2.0
    assert found.times["itl"].count == 2


def test_goodput_needs_limits() -> None:
    assert figures([record()], {}).good is None


def test_no_requests_have_no_times() -> None:
    found = figures([], {"ttft": 1.0})
    assert (found.times, found.total, found.seconds, found.per_second(5)) == ({}, 0, 0.0, 0.0)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = spread(values)
    assert [found.p50, found.p90, found.p99] == np.percentile(values, (50, 90, 99)).tolist()
    assert found.count == len(values)


def test_nothing_has_no_percentiles() -> None:
    with pytest.raises(ValueError, match="no values"):
        spread([])
