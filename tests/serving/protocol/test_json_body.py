"""Tests of the strict parser of request bodies."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.serving.protocol.errors import MOST_DEPTH, InvalidField, parse_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@pytest.mark.night
@given(st.dictionaries(st.text(), VALUES))
def test_every_object_survives(value: dict[str, object]) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1', "not valid JSON: Expecting ',' delimiter: line 1, column 8"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": [[-1e999]]}', "too large"),
        (b'{"a": 1, "a": 2}', 'the key "a" occurs twice'),
        (b'{"a": ' + b"1" * 5000 + b"}", "5,000 digits"),
        (b'{"a": "\xff"}', "not UTF-8 text: invalid byte at 7"),
        (b"\xef\xbb\xbf", "not valid JSON"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16 text; send UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "UTF-16 text"),
        ('{"a": 1}'.encode("utf-16-be"), "UTF-16 text"),
        (b'{"a": "x\\ud800y"}', r"unpaired surrogate in a string: x\ud800"),
        (b'{"a": [{"\\udc00": 1}]}', "unpaired surrogate"),
        (b'{"a": "\x01"}', "Invalid control character"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", f"more than {MOST_DEPTH} levels"),
        (b'{"a": ' + b'{"a":' * 100_000, f"more than {MOST_DEPTH} levels"),
        (b'{"a": [' + b"[]," * 1_000_000 + b"1]}", "commas and brackets"),
    ],
)
def test_anything_else_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_json(data)
    assert words in f"{caught.value}; {caught.value.hint}"
    assert caught.value.param is None


def test_a_byte_order_mark_is_ignored() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}


def test_paired_surrogates_are_one_character() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_the_deepest_body_is_accepted() -> None:
    depth = MOST_DEPTH - 1
    assert parse_json(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(InvalidField, match="levels deep"):
        parse_json(b'{"a": ' + b"[" * (depth + 1) + b"]" * (depth + 1) + b"}")


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(InvalidField):
        assert type(parse_json(data)) is dict
