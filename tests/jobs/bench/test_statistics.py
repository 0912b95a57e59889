"""Tests of distributions, ratios and their intervals (llmrun/jobs/bench/statistics.py)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.jobs.bench.statistics import (
    ENOUGH_ROUNDS,
    MINIMUM_ROUNDS,
    Interval,
    distribution,
    is_narrow,
    paired_ratio,
    student_quantile,
    typical,
    unpaired_ratio,
    verdict_level,
)
from tests.support.tiers import examples

positive = st.floats(1e-6, 1e6)
rounds = st.lists(st.tuples(positive, positive), min_size=1, max_size=40)
bad_values = pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])


def near(one: Interval, other: Interval) -> None:
    assert one == pytest.approx(other, rel=1e-6)


def noisy(count: int, *, seed: int = 0, spread: float = 0.05, slower: float = 1.0) -> tuple[list[float], list[float]]:
    """Return times of a and b with a common level that drifts by 20 % either way, and independent heavy tails."""
    random = np.random.default_rng(seed)
    level = 0.2 * np.sin(np.arange(count) / 7)
    a, b = 0.1 * np.exp(level + spread * random.standard_t(3, (2, count)))
    return a.tolist(), (slower * b).tolist()


def test_a_distribution_tells_percentiles_only_of_enough_values() -> None:
    few, some, many = (distribution([float(i) for i in range(1, n + 1)]) for n in (19, 21, 101))
    assert (few.count, few.median, few.mean, few.p95, few.p99) == (19, 10.0, 10.0, None, None)
    assert (some.p95, some.p99) == (20.0, None)
    assert (many.median, many.p95, many.p99) == (51.0, 96.0, 100.0)
    assert few.stddev == pytest.approx(5.627314)


def test_percentiles_lie_between_their_neighbours() -> None:
    assert distribution([float(i) for i in range(20)]).p95 == pytest.approx(18.05)


def test_a_single_value_has_no_spread() -> None:
    assert distribution([3.0]).stddev == 0.0


def test_a_distribution_of_nothing_or_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        distribution([])
    with pytest.raises(ValueError, match="finite: nan"):
        distribution([1.0, math.nan])


@given(rounds, st.booleans())
@settings(deadline=None, max_examples=examples(60))
def test_the_interval_holds_its_ratio(pairs: list[tuple[float, float]], is_speed: bool) -> None:
    a, b = zip(*pairs, strict=True)
    for found in (paired_ratio(a, b, is_speed=is_speed), unpaired_ratio(a, b, is_speed=is_speed), typical(a)):
        assert 0 <= found.low <= found.ratio <= found.high
        assert 0 < found.ratio < math.inf


@pytest.mark.push
@given(rounds, positive)
@settings(deadline=None, max_examples=examples(60))
def test_another_unit_of_time_changes_no_ratio(pairs: list[tuple[float, float]], factor: float) -> None:
    a, b = zip(*pairs, strict=True)
    scaled = [factor * value for value in a], [factor * value for value in b]
    for ratio in (paired_ratio, unpaired_ratio):
        found, again = ratio(a, b, is_speed=True), ratio(*scaled, is_speed=True)
        assert again.ratio == pytest.approx(found.ratio, rel=1e-6)
        if math.isfinite(found.high) and found.high / found.ratio < 1e6:
            near(again, found)


@given(rounds, st.booleans())
@settings(deadline=None, max_examples=examples(60))
def test_swapped_it_is_the_inverse(pairs: list[tuple[float, float]], is_speed: bool) -> None:
    a, b = zip(*pairs, strict=True)
    for ratio in (paired_ratio, unpaired_ratio):
        there, back = ratio(a, b, is_speed=is_speed), ratio(b, a, is_speed=is_speed)
        assert back.ratio == pytest.approx(1 / there.ratio, rel=1e-9)
        if math.isfinite(there.high) and there.low > 0:
            assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low), rel=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("odd", "width"), [(1, 0.0), (3, 0.0), (10, math.inf)])
def test_equal_values_with_a_few_others_have_an_interval(odd: int, width: float) -> None:
    """The standard error is 0 if all values but the trimmed ones are equal."""
    a = [1.0] * (20 - odd) + [1.5] * odd
    for ratio in (paired_ratio, unpaired_ratio):
        found = ratio(a, [1.0] * 20, is_speed=True)
        assert found.high - found.low == width


def test_times_and_speeds_give_the_same_ratio() -> None:
    a, b = noisy(20)
    speeds = [1 / value for value in a], [1 / value for value in b]
    near(paired_ratio(a, b, is_speed=False), paired_ratio(*speeds, is_speed=True))


def test_twice_the_speed_is_a_ratio_of_two() -> None:
    slow = noisy(30)[0]
    assert paired_ratio([2 * value for value in slow], slow, is_speed=True).ratio == pytest.approx(2)
    assert paired_ratio([value / 2 for value in slow], slow, is_speed=False).ratio == pytest.approx(2)


def test_constant_samples_leave_no_doubt() -> None:
    near(paired_ratio([3.0] * 9, [7.0] * 9, is_speed=False), Interval(7 / 3, 7 / 3, 7 / 3))
    near(unpaired_ratio([3.0] * 9, [7.0] * 12, is_speed=True), Interval(3 / 7, 3 / 7, 3 / 7))


def test_the_same_numbers_are_exactly_one() -> None:
    a = noisy(20)[0]
    assert paired_ratio(a, a, is_speed=True) == Interval(1.0, 1.0, 1.0)


def test_fewer_rounds_than_the_minimum_say_nothing() -> None:
    a, b = noisy(MINIMUM_ROUNDS - 1, slower=3.0)
    for found in (paired_ratio(a, b, is_speed=False), unpaired_ratio(a, b, is_speed=False)):
        assert (found.low, found.high) == (0.0, math.inf)
        assert found.ratio > 1


@pytest.mark.push
@pytest.mark.parametrize("rounds", range(MINIMUM_ROUNDS, ENOUGH_ROUNDS))
def test_a_few_rounds_show_what_is_plain_and_rarely_claim_what_is_not(rounds: int) -> None:
    random = np.random.default_rng(rounds)
    claimed = found = 0
    for _ in range(300):
        a, b = (np.exp(0.03 * random.standard_t(3, rounds)) for _ in range(2))
        equal = paired_ratio(a.tolist(), b.tolist(), is_speed=True)
        claimed += not equal.low <= 1 <= equal.high
        found += paired_ratio((3 * a).tolist(), b.tolist(), is_speed=True).low > 1
    assert claimed <= 6
    assert found >= 240


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [(0.99, 1, 63.657), (0.99, 2, 9.925), (0.99, 3, 5.841), (0.99, 4, 4.604), (0.995, 5, 4.773), (0.95, 7, 2.365)],
)
def test_students_quantiles_are_those_of_the_tables(level: float, freedom: int, expected: float) -> None:
    assert student_quantile(level, freedom) == pytest.approx(expected, abs=5e-4)


def test_an_outlier_moves_little() -> None:
    a, b = noisy(20)
    clean = paired_ratio(a, b, is_speed=False)
    a[7] *= 100
    assert paired_ratio(a, b, is_speed=False).ratio == pytest.approx(clean.ratio, rel=0.05)


def test_to_be_first_in_a_round_is_no_difference() -> None:
    """The first turn of a round takes 10 % longer, as llama.cpp's prefill does in the recordings."""
    random = np.random.default_rng(1)
    a, b = 0.1 * np.exp(0.01 * random.standard_normal((2, 40)))
    a[0::2] *= 1.1
    b[1::2] *= 1.1
    found = paired_ratio(a.tolist(), b.tolist(), is_speed=False)
    assert found.low <= 1 <= found.high
    assert found.high / found.low < 1.03  # 1.10 without the correction


def test_rounds_that_remember_widen_the_interval() -> None:
    random = np.random.default_rng(2)
    shocks = 0.05 * random.standard_normal(60)
    remembering = [shocks[0]]
    for shock in shocks[1:]:
        remembering.append(0.7 * remembering[-1] + 0.71 * shock)
    ordered = np.exp(remembering)
    ones = [1.0] * 60
    mixed = ordered[random.permutation(60)]
    found = [paired_ratio(values.tolist(), ones, is_speed=True) for values in (ordered, mixed)]
    widths = [math.log(one.high / one.low) for one in found]
    assert widths[0] > 1.5 * widths[1]


def test_the_same_samples_give_the_same_verdict() -> None:
    a, b = noisy(24)
    assert paired_ratio(a, b, is_speed=True) == paired_ratio(list(a), list(b), is_speed=True)


def test_a_higher_level_is_a_wider_interval() -> None:
    a, b = noisy(24)
    widths = [paired_ratio(a, b, is_speed=True, level=level) for level in (0.9, 0.99, 0.999)]
    assert widths[0].high < widths[1].high < widths[2].high


def test_the_level_is_shared_by_the_verdicts_of_a_run() -> None:
    assert [verdict_level(count) for count in (1, 2, 10)] == pytest.approx([0.99, 0.995, 0.999])
    with pytest.raises(ValueError, match="not 0"):
        verdict_level(0)


def test_narrow_is_the_upper_end_over_the_lower() -> None:
    assert is_narrow(Interval(1.0, 0.98, 1.02), 0.05)
    assert not is_narrow(Interval(1.0, 0.97, 1.03), 0.05)
    assert not is_narrow(Interval(1.0, 0.0, math.inf), 0.05)


@bad_values
def test_values_that_no_clock_gives_are_refused(bad: float) -> None:
    good = [1.0] * 10
    wrong = [*good[1:], bad]
    for ratio in (paired_ratio, unpaired_ratio):
        with pytest.raises(ValueError, match="a: a value is not above 0 and finite"):
            ratio(wrong, good, is_speed=True)
        with pytest.raises(ValueError, match="b: a value is not above 0 and finite"):
            ratio(good, wrong, is_speed=True)


def test_a_round_without_its_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="9 and 10"):
        paired_ratio([1.0] * 9, [1.0] * 10, is_speed=True)
