"""Tests of the bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.tokens import (
    check_pieces,
    detokenize_body,
    parse_detokenize,
    parse_tokenize,
    tokenize_body,
)
from tests.support.protocol.answers import FACTS


@pytest.mark.parametrize(
    ("body", "text", "special"),
    [
        ({"content": "Hi"}, "Hi", False),
        ({"prompt": "Hi"}, "Hi", True),
        ({"content": "", "add_special": True}, "", True),
        ({"prompt": "Hi", "add_special_tokens": False, "model": "tiny"}, "Hi", False),
    ],
)
def test_both_servers_fields_are_accepted(body: dict[str, Any], text: str, special: bool) -> None:
    call = parse_tokenize(body)
    assert (call.text, call.add_special, call.parse_special, call.with_pieces) == (text, special, True, False)


def test_the_number_of_pieces_is_limited() -> None:
    check_pieces(range(100_000))
    with pytest.raises(InvalidField, match="100,001 tokens") as error:
        check_pieces(range(100_001))
    assert error.value.param == "with_pieces"


def test_control_strings_can_stay_text() -> None:
    assert not parse_tokenize({"content": "<s>", "parse_special": False}).parse_special


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": 1}, "content"),
        ({"content": "a", "prompt": "b"}, "prompt"),
        ({"content": "a", "add_special": 1}, "add_special"),
        ({"content": "a", "add_special": True, "add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_invalid_texts_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_tokenize(body)
    assert caught.value.param == param


@pytest.mark.parametrize("tokens", [None, "1", [1.0], [True], [-1], [1000], [10**400], {"a": 1}])
def test_invalid_tokens_are_refused_by_name(tokens: object) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_detokenize({"tokens": tokens}, FACTS)
    assert str(caught.value.param).startswith("tokens")


def test_tokens_come_with_their_pieces() -> None:
    assert tokenize_body([1, 2], FACTS) == {"tokens": [1, 2], "count": 2, "max_model_len": 4096}
    found = tokenize_body([1, 2], FACTS, [b"H", b"\xe2\x80"])
    assert found["tokens"] == [{"id": 1, "piece": "H"}, {"id": 2, "piece": [0xE2, 0x80]}]


def test_tokens_become_text() -> None:
    assert parse_detokenize({"tokens": [0, 999]}, FACTS) == ((0, 999), ())
    assert detokenize_body(b"H\xff")["content"] == "H\ufffd"
