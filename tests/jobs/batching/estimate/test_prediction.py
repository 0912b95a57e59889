"""Tests of the predicted time and price of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.jobs.batching.estimate.estimating import ApiPrice, Workload, run_seconds
from llmrun.jobs.batching.estimate.sampling import Speeds
from llmrun.jobs.bench.intervals import Interval

SPEEDS = Speeds(0.001, 0.002, 0.016, 1.0, Interval(1.0, 1.0, 1.0))
LOAD_S = 3.0


def workload(calls: int = 1600, *, generated: Interval | None = None, common: int = 0) -> Workload:
    total = generated or Interval.exact(100 * calls)
    return Workload(calls, 16, 50 * calls, common, total, [100])


def test_time_is_the_sum_of_its_parts() -> None:
    """Answers of equal lengths end together, so the last ones take no longer than the others."""
    assert run_seconds(workload(), SPEEDS, LOAD_S).estimate == pytest.approx(3 + 80 + 320)


def test_a_single_answer_has_no_others_beside_it() -> None:
    """It takes 100 steps of 16 ms and a part for the answer itself, which is 1 ms of the 2 ms at full speed."""
    assert run_seconds(workload(1), SPEEDS, LOAD_S).estimate == pytest.approx(3 + 0.05 + 100 * (0.016 + 0.001))


def test_the_longest_answers_end_last() -> None:
    work = workload(160)
    mixed = Workload(160, 16, work.computed, 0, work.generated, [10] * 9 + [910])
    equal_s, mixed_s = (run_seconds(each, SPEEDS, LOAD_S).estimate for each in (work, mixed))
    assert equal_s < mixed_s < equal_s + 910 * 0.016


def test_intervals_follow_from_lengths_and_drift() -> None:
    by_length = run_seconds(workload(generated=Interval(160_000, 150_000, 170_000)), SPEEDS, LOAD_S)
    assert by_length.high - by_length.estimate == pytest.approx(20)
    assert by_length.estimate - by_length.low == pytest.approx(20)
    drifting = Speeds(0.001, 0.002, 0.016, 1.0, Interval(1.0, 0.9, 1.2))
    by_drift = run_seconds(workload(), drifting, LOAD_S)
    assert by_drift.high - by_drift.estimate == pytest.approx(80)
    assert by_drift.estimate - by_drift.low == pytest.approx(40)


@pytest.mark.push
@given(st.integers(1, 3000), st.integers(1, 5000), st.integers(0, 50), st.lists(st.integers(1, 900), min_size=1))
def test_n_machines_are_never_more_than_n_times_as_fast(
    calls: int, machines: int, common: int, lengths: list[int]
) -> None:
    work = Workload(calls, 16, 50 * calls, common, Interval.exact(calls * sum(lengths) / len(lengths)), lengths)
    one, several = (run_seconds(work, SPEEDS, LOAD_S, count).estimate for count in (1, machines))
    assert (one - LOAD_S) / machines <= (several - LOAD_S) * (1 + 1e-9)


def test_more_machines_than_calls_do_not_help() -> None:
    assert run_seconds(workload(5), SPEEDS, LOAD_S, 5) == run_seconds(workload(5), SPEEDS, LOAD_S, 500)


def test_every_machine_computes_the_common_prefix() -> None:
    apart, common = (run_seconds(workload(common=of), SPEEDS, LOAD_S, 4).estimate for of in (0, 40))
    assert common - apart == pytest.approx(0.001 * 40 * 3 / 4)


def test_prices_are_for_a_million_tokens() -> None:
    price = ApiPrice(0.5, 2.0)
    assert price.of(4_000_000, Interval(1e6, 0.5e6, 3e6)) == (4, 3, 8)
    assert price.of_prompts(1_000_000) == 0.5
