"""Tests of the comparison of predicted with actual waits."""

from __future__ import annotations

import pytest

from llmrun.jobs.bench.serving.checks import judge_predicted_waits, judge_retry_after
from tests.support.bench.serving import accepted, record, rejected


def test_an_honest_retry_after_has_no_error() -> None:
    records = [record(0.0, (4.0,), tries=[rejected(0.0, 4.0), accepted(4.0)]) for _ in range(3)]
    found = judge_retry_after(records)
    assert (found.rejections, found.with_time, found.obeyed, found.accepted) == (3, 3, 3, 3)
    assert found.promised == (4.0, 4.0, 4.0)
    assert found.error == 0.0
    assert found.newcomer_error is None


def test_a_short_retry_after_shows_in_the_actual_wait() -> None:
    tries = [rejected(0.0, 1.0), rejected(1.0, 1.0), rejected(2.0, 1.0), accepted(3.0)]
    found = judge_retry_after([record(0.0, (4.0,), tries=tries)])
    assert (found.rejections, found.obeyed, found.accepted) == (3, 1, 0)
    assert found.error == 0.75


def test_a_long_retry_after_shows_beside_newcomers() -> None:
    obedient = record(0.0, (20.0,), tries=[rejected(0.0, 20.0), accepted(20.0)])
    newcomers = [record(1.0, (4.0,)), record(1.5, (5.0,))]
    found = judge_retry_after([obedient, *newcomers])
    assert found.error == 0.0
    assert found.newcomer_error == 4.0  # |20 - 4| / 4


def test_requests_sent_before_the_429_are_no_newcomers() -> None:
    obedient = record(2.0, (6.0,), tries=[rejected(2.0, 4.0), accepted(6.0)])
    assert judge_retry_after([record(0.0, (2.5,)), obedient]).newcomer_error is None


def test_a_429_without_a_time_is_only_counted() -> None:
    found = judge_retry_after([record(problem="HTTP 429", tries=[rejected(0.0, None)])])
    assert (found.rejections, found.with_time, found.obeyed, found.promised) == (1, 0, 0, None)


def test_predicted_waits_are_compared_without_the_prefill() -> None:
    records = [
        record(0.0, (2.5,), tries=[accepted(0.0, predicted_wait=2.0)]),  # 2 s and 0.5 s of prefill
        record(0.0, (4.5,), tries=[accepted(0.0, predicted_wait=1.0)]),  # 4 s
        record(0.0, (0.6,), tries=[accepted(0.0, predicted_wait=9.0)]),  # too short to compare
        record(0.0, (9.0,)),  # without a prediction
    ]
    found = judge_predicted_waits(records, 0.5)
    assert found is not None
    assert (found.predicted, found.compared) == (3, 2)
    assert found.error == pytest.approx((0.0 + 0.75) / 2)
    assert found.within_2x == 0.5


def test_without_predictions_there_is_nothing_to_judge() -> None:
    assert judge_predicted_waits([record()], 0.0) is None


def test_short_waits_give_no_error() -> None:
    found = judge_predicted_waits([record(0.0, (0.5,), tries=[accepted(0.0, predicted_wait=0.0)])], 0.1)
    assert found is not None
    assert (found.error, found.within_2x) == (None, None)
