"""Tests of dates and times."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.constraint.answer_checks import is_date, is_date_time, is_time


@pytest.mark.parametrize("text", ["2024-02-29", "2000-02-29", "0000-02-29", "9999-12-31"])
def test_days_that_exist_are_dates(text: str) -> None:
    assert is_date(text)


@pytest.mark.parametrize("text", ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-10", "2024-1-1", ""])
def test_days_that_do_not_exist_are_not(text: str) -> None:
    assert not is_date(text)
    assert not is_date_time(text + "T00:00:00Z")


@pytest.mark.parametrize("text", ["23:59:60Z", "15:59:60-08:00", "01:29:60+01:30", "23:59:60.9z"])
def test_leap_seconds_end_the_day_in_utc(text: str) -> None:
    assert is_time(text)


@pytest.mark.parametrize(
    "text", ["22:59:60Z", "23:59:60+01:00", "23:59:61Z", "24:00:00Z", "1:00:00Z", "12:00:00", "12:60:00Z"]
)
def test_other_times_are_refused(text: str) -> None:
    assert not is_time(text)


@given(st.datetimes(), st.integers(-1439, 1439))
def test_python_and_we_agree(moment: datetime, offset: int) -> None:
    assert is_date_time(moment.replace(tzinfo=timezone(timedelta(minutes=offset))).isoformat())


@given(st.none() | st.integers() | st.lists(st.text()))
def test_only_text_has_a_format(value: object) -> None:
    assert is_date(value)
    assert is_time(value)
    assert is_date_time(value)
