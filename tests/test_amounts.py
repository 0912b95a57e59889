"""Sizes, ages and columns as people read them."""

from __future__ import annotations

import pytest

from llmrun.amounts import age_in_words, bytes_in_words, counted, tokens_in_words
from llmrun.cli.columns import aligned


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
    assert bytes_in_words(count) == words


def test_tokens() -> None:
    assert [tokens_in_words(count) for count in (0, 8192, 131072, 1_000_000, 1 << 20)] == [
        "",
        "8k",
        "128k",
        "1,000,000",
        "1,048,576",
    ]


def test_ages_and_counts() -> None:
    ages = (0, 59, 60, 119, 120, 7200, 86_400, 3 * 86_400, 8 * 86_400, 800 * 86_400)
    assert [age_in_words(1e9 - age, 1e9) for age in ages] == [
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
    assert age_in_words(2e9, 1e9) == "just now"  # a clock that was set back
    assert [counted(count, "model") for count in (0, 1, 2)] == ["0 models", "1 model", "2 models"]


def test_columns_are_as_wide_as_their_widest_cell_on_a_terminal() -> None:
    assert aligned([("日本", "1"), ("a\x1b", "22"), ("", "3")], (1,)) == ["日本   1", "a␛    22", "       3"]
    assert aligned([("a", ""), ("bb", "")]) == ["a", "bb"]
