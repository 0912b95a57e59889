"""Tests of the exact patterns for dates and times, and of the texts that patterns match."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.constraint.answer_checks import is_date, is_date_time, is_time
from llmrun.engine.constraint.patterns import PATTERNS, listed_texts
from llmrun.engine.constraint.rewriting import enforceable
from tests.support.constraint.matchers import accepts, byte_tokenizer, matcher, schema_grammar

CHECKS: dict[str, Callable[[object], bool]] = {"date": is_date, "time": is_time, "date-time": is_date_time}
NEARLY = {
    "date": r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    "time": r"[0-2][0-9]:[0-6][0-9]:[0-6][0-9](\.[0-9]{1,9})?([Zz]|[+-][0-2][0-9]:[0-6][0-9])",
}
NEARLY["date-time"] = f"{NEARLY['date']}[Tt]{NEARLY['time']}"


def accepted(name: str, text: str) -> bool:
    return re.fullmatch(PATTERNS[name], text) is not None


@pytest.mark.push
@pytest.mark.parametrize("name", CHECKS)
@given(st.data())
def test_everything_accepted_has_the_format(name: str, data: st.DataObject) -> None:
    assert CHECKS[name](data.draw(st.from_regex(re.compile(PATTERNS[name], re.ASCII), fullmatch=True)))


@pytest.mark.push
@pytest.mark.parametrize("name", CHECKS)
@given(st.data())
def test_only_leap_seconds_are_left_out(name: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(re.compile(NEARLY[name], re.ASCII), fullmatch=True))
    assert accepted(name, text) == (CHECKS[name](text) and ":60" not in text)


@pytest.mark.push
def test_all_days_of_the_calendar_are_dates() -> None:
    """The calendar repeats every 400 years, and Python's begins with year 1."""
    for year in (0, *range(1, 401), 1900, 2000, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert accepted("date", text) == is_date(text), text


@given(st.datetimes(), st.integers(-1439, 1439))
def test_all_times_of_python_are_accepted(moment: datetime, offset: int) -> None:
    zoned = moment.replace(tzinfo=timezone(timedelta(minutes=offset)))
    assert accepted("date-time", zoned.isoformat())
    assert accepted("time", zoned.timetz().isoformat())


@given(st.dates(), st.booleans())
def test_the_compiler_reads_the_pattern_as_python_does(day: date, exists: bool) -> None:
    text = day.isoformat() if exists else f"{day.year:04}-02-29"
    matching = matcher(byte_tokenizer(), schema_grammar({"pattern": PATTERNS["date"]}))
    assert accepts(matching, list(f'"{text}"'.encode())) == is_date(text)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("json-pointer", ("", "/", "/a/0", "/a~0b~1c//"), ("a", "/~", "/~2", "#/a")),
        ("relative-json-pointer", ("0", "10#", "2/a~1b", "0/"), ("", "01", "-1", "/a", "0a", "0##")),
    ],
)
def test_pointers_are_enforced(name: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    assert [accepted(name, text) for text in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


def test_only_formats_of_dates_are_replaced() -> None:
    schema = {
        "format": "date",
        "properties": {"format": {"format": "time", "maxLength": 9}, "a": {"format": "date", "pattern": "^2"}},
        "anyOf": [{"format": "date-time"}, {"format": "email"}, {"format": 3}],
        "const": {"format": "date"},
    }
    before = str(schema)
    assert enforceable(schema) == {
        "pattern": PATTERNS["date"],
        "properties": {
            "format": {"pattern": PATTERNS["time"], "maxLength": 9},
            "a": {"format": "date", "pattern": "^2"},
        },
        "anyOf": [{"pattern": PATTERNS["date-time"]}, {"format": "email"}, {"format": 3}],
        "const": {"format": "date"},
    }
    assert str(schema) == before


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^a$", ["a"]),
        ("^$", [""]),
        ("^(asc|desc)$", ["asc", "desc"]),
        ("^(?:x[ab]|c\\.d|x[a])$", ["xa", "xb", "c.d"]),
        ("^((a|b)(c|))e$", ["ace", "ae", "bce", "be"]),
        ("^a$|^b$", ["a", "b"]),
        ("^[0-2-]$", ["0", "1", "2", "-"]),
        ("a", None),
        ("^a|b$", None),
        ("^a|(b)$", None),
        ("^a*$", None),
        ("^.$", None),
        ("^[^a]$", None),
        ("^\\d$", None),
        ("^(a|b$", None),
        ("^a)$", None),
        ("^[z-a]$", None),
        ("^$a$", None),
        ("^[a-z][a-z]$", None),
        ("^" + "(" * 10_000 + "a" + ")" * 10_000 + "$", None),
        ("^" + "(" * 30 + "a" + ")" * 30 + "$", None),
    ],
)
def test_texts_of_a_pattern_are_listed(pattern: str, texts: list[str] | None) -> None:
    assert listed_texts(pattern) == texts
