"""Tests that axes cover their values, have a few round ticks, and place values in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.jobs.bench.html.charts import drawable, linear_axis, spread_axis, time_unit

VALUES = st.floats(0, 1e12).filter(drawable)


@pytest.mark.push
@given(st.lists(VALUES, min_size=1, max_size=9), st.integers(3, 7), st.booleans())
def test_an_axis_holds_its_values_and_few_ticks(values: list[float], most: int, is_linear: bool) -> None:
    axis = linear_axis(min(values), max(values), most) if is_linear else spread_axis(values, most)
    assert 1 <= len(axis.ticks) <= most
    places = [tick.at for tick in axis.ticks]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    placed = [axis.place(value) for value in sorted(values)]
    assert placed == sorted(placed)
    assert all(0 <= place <= 100 for place in placed)
    margin = 1e-6 * max(values)
    assert axis.high >= max(values) - margin
    assert axis.is_logarithmic or axis.low <= min(values) + margin


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 152, ["0", "50", "100", "150"]),
        (0, 2210, ["0", "500", "1,000", "1,500", "2,000"]),
        (0, 1.07, ["0.0", "0.5", "1.0"]),
        (0.0, 100.0, ["0", "50", "100"]),
        (231, 256, ["235", "240", "245", "250", "255"]),
    ],
)
def test_linear_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [tick.label for tick in linear_axis(low, high).ticks] == labels


def test_a_long_tail_makes_an_axis_logarithmic() -> None:
    axis = spread_axis([6.1, 7.0, 88.0], 7)
    assert axis.is_logarithmic
    assert [tick.label for tick in axis.ticks] == ["5", "10", "20", "50", "100"]
    assert [tick.label for tick in spread_axis([6.1, 7.0, 88.0], 3).ticks] == ["10", "100"]
    assert not spread_axis([6.1, 7.0, 8.8], 7).is_logarithmic


def test_times_are_drawn_in_the_unit_that_reads_well() -> None:
    assert [time_unit(longest)[1] for longest in (0.0008, 0.05, 1.07, 2.5)] == ["µs", "ms", "ms", "s"]
