"""Tests of the fields that chat completions and completions share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.protocol.answers import chat, completion
from tests.support.protocol.refusals import refused


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": -1}, None),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"n_predict": 9}, 9),
    ],
)
def test_the_newer_token_limit_wins(fields: dict[str, Any], limit: int | None) -> None:
    assert chat(**fields).requests[0].max_tokens == limit
    assert completion(**fields).requests[0].max_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
@pytest.mark.parametrize("value", [-2, 1.5, "5", True, 2**31])
def test_invalid_token_limits_are_refused(name: str, value: Any) -> None:
    refused(chat, name, **{name: value})


@pytest.mark.parametrize(
    ("stop", "stops"), [(None, ()), ("a", ("a",)), ([], ()), (["a", "b"], ("a", "b")), (["x" * 256], ("x" * 256,))]
)
def test_stop_is_a_text_or_a_list(stop: Any, stops: tuple[str, ...]) -> None:
    assert chat(stop=stop).requests[0].stop == stops


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        ("", "stop"),
        (5, "stop"),
        ({"a": 1}, "stop"),
        (["a", ""], "stop[1]"),
        (["a", None], "stop[1]"),
        (["a"] * 33, "stop"),
        (["x" * 257], "stop[0]"),
    ],
)
def test_invalid_stops_are_refused(stop: Any, param: str) -> None:
    refused(chat, param, stop=stop)


@pytest.mark.parametrize(
    ("fields", "usage"),
    [
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {}}, False),
        ({"stream": False, "stream_options": {"include_usage": True}}, False),
    ],
)
def test_usage_is_streamed_only_on_request(fields: dict[str, Any], usage: bool) -> None:
    assert chat(**fields).include_usage is usage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"model": 5}, "model"),
        ({"user": 5}, "user"),
        ({"metadata": "a"}, "metadata"),
    ],
)
def test_other_invalid_values_are_refused(fields: dict[str, Any], param: str) -> None:
    refused(chat, param, **fields)
    refused(completion, param, **fields)


def test_messages_about_values_are_short() -> None:
    assert refused(chat, "n", n="x" * 10_000).startswith('n: expected an integer from 1 to 128, got "xxx')
    assert len(refused(chat, "n", n="x" * 10_000)) < 150
    assert refused(chat, "n", n=10**4000).startswith("n: expected an integer from 1 to 128, got 1000")
