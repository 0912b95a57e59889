"""Tests of sizes, ages and columns in readable form."""

from __future__ import annotations

import math
import re

import pytest

from llmrun.base.amounts import (
    counted,
    format_age,
    format_bandwidth,
    format_bytes,
    format_bytes_done,
    format_clock,
    format_mebibytes,
    format_number,
    format_parameters,
    format_percent,
    format_roughly,
    format_seconds,
    format_seconds_briefly,
    format_seconds_roughly,
    format_tokens,
    parse_duration,
)
from llmrun.cli.console.output import aligned


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_995, "10.0 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (98_362_432, "98.4 MB"),
        (2_497_280_256, "2.50 GB"),
        (66_000_000_000, "66.0 GB"),
        (3_000_000_000_000, "3.00 TB"),
        (1_234_000_000_000_000, "1,234 TB"),
    ],
)
def test_bytes(count: int, words: str) -> None:
    assert format_bytes(count) == words


def test_tokens() -> None:
    assert [format_tokens(count) for count in (0, 8192, 131072, 1_000_000, 1 << 20)] == [
        "",
        "8k",
        "128k",
        "1,000,000",
        "1,048,576",
    ]


def test_numbers_for_people_have_two_digits() -> None:
    values = (0, 0.0312, 0.996, 9.94, 9.96, 23.4, 1234.5, math.nan)
    assert [*map(format_roughly, values)] == ["0", "0.031", "1.0", "9.9", "10", "23", "1,234", "–"]
    seconds = (0.0312, 9.12, 44.2, 99.4, 99.6, 124.4)
    expected = ["0.031 s", "9.1 s", "44 s", "99 s", "1 min 40 s", "2 min 04 s"]
    assert [*map(format_seconds_roughly, seconds)] == expected


def test_ages_and_counts() -> None:
    ages = (0, 59, 60, 119, 120, 7200, 86_400, 3 * 86_400, 8 * 86_400, 800 * 86_400)
    assert [format_age(1e9 - age, 1e9) for age in ages] == [
        "just now",
        "just now",
        "1 minute ago",
        "1 minute ago",
        "2 minutes ago",
        "2 hours ago",
        "1 day ago",
        "3 days ago",
        "1 week ago",
        "2 years ago",
    ]
    assert format_age(2e9, 1e9) == "just now"  # a clock that was set back
    assert [counted(count, "model") for count in (0, 1, 2)] == ["0 models", "1 model", "2 models"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (0.0391, "0.039"),
        (0.99949, "0.999"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (92.04, "92.0"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (-3.14159, "-3.14"),
        (1.5e12, "1.5e+12"),
        (2e-7, "2e-07"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_numbers_have_three_digits(value: float, words: str) -> None:
    assert format_number(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.00000042, "0.420 µs"),
        (0.00084, "840 µs"),
        (0.00099949, "999 µs"),
        (0.0009996, "1.00 ms"),
        (0.0083, "8.30 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (124, "2 min 04 s"),
        (math.nan, "–"),
    ],
)
def test_times_have_the_unit_that_suits(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0us"),
        (0.00084, "840us"),
        (0.0083, "8.3ms"),
        (0.0123, "12ms"),
        (0.9994, "999ms"),
        (0.9996, "1.00s"),
        (1.514, "1.51s"),
        (12.34, "12.3s"),
        (99.96, "1m40s"),
        (124.4, "2m04s"),
    ],
)
def test_brief_times_have_few_digits(seconds: float, words: str) -> None:
    assert format_seconds_briefly(seconds) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0:00"), (4, "0:04"), (750, "12:30"), (11_100, "3:05:00")])
def test_times_left_look_like_a_clock(seconds: float, words: str) -> None:
    assert format_clock(seconds) == words


def test_shares_memory_and_bandwidth() -> None:
    assert [format_percent(share) for share in (0.0512, 0.744, 12.5, math.nan)] == ["5.1%", "74%", "1,250%", "–"]
    assert [format_mebibytes(count) for count in (312 << 20, 5 << 30, math.inf)] == ["312 MiB", "5,120 MiB", "–"]
    assert [format_bandwidth(count) for count in (39.14e9, 0.9e9)] == ["39.1 GB/s", "0.900 GB/s"]
    assert format_parameters(134_515_008) == "135 million parameters"


def test_what_is_done_has_the_unit_of_the_total() -> None:
    assert format_bytes_done(40_330_000, 98_362_432) == "40.3/98.4 MB"
    assert format_bytes_done(98_362_432, 2_497_280_256) == "0.10/2.50 GB"


def test_columns_are_as_wide_as_their_widest_cell_on_a_terminal() -> None:
    assert aligned([("日本", "1"), ("a\x1b", "22"), ("", "3")], (1,)) == ["日本   1", "a␛    22", "       3"]
    assert aligned([("a", ""), ("bb", "")]) == ["a", "bb"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("90", 90),
        ("0.5s", 0.5),
        ("0", 0),
        ("250ms", 0.25),
        ("-1", math.inf),
        ("-5m", math.inf),
        ("+5m", 300),
        (".5h", 1800),
        ("1.h", 3600),
        ("1µs", 1e-6),
        ("1μs", 1e-6),
        ("1us", 1e-6),
        ("1ns", 1e-9),
    ],
)
def test_durations_are_read_as_in_ollama(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-", "m", "5x", "5 m", "1h30", "1e3", "٣", "--5", "nan"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_duration(text)
