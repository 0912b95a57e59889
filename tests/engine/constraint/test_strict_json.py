"""Tests of strict JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.constraint.strict_json import MOST_DIGITS, TooManyDigits, parse, parse_unique

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_json_is_read_as_python_reads_it(value: object) -> None:
    assert parse(json.dumps(value)) == parse_unique(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text", ["NaN", "[-Infinity]", "", "{", "{} x", "[1,]", "'a'", '"\t"', "01", "\ufeff1", "\ud800", "// a\n1"]
)
def test_what_is_not_json_is_refused(text: str) -> None:
    for function in (parse, parse_unique):
        with pytest.raises(ValueError, match=r"."):
            function(text)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "\\u0061": 2}}]'])
def test_the_last_value_of_a_key_wins_or_the_key_is_refused(text: str) -> None:
    assert parse(text) == json.loads(text)
    with pytest.raises(ValueError, match='"a" occurs twice'):
        parse_unique(text)


def test_long_integers_are_refused_before_they_are_read() -> None:
    assert parse("1" * MOST_DIGITS) == int("1" * MOST_DIGITS)
    assert parse("-" + "1" * MOST_DIGITS) == -int("1" * MOST_DIGITS)
    with pytest.raises(TooManyDigits, match="1,000,000 digits"):
        parse("1" * 1_000_000)
    assert parse("1e999") == float("inf")
