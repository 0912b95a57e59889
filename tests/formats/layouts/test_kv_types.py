"""Tests of the notation of --kv-type and of the sizes of keys and values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.formats.layouts.kv import F16, KV_CHOICES, KV_TYPE, KV_TYPES, Q4_0, Q8_0, KeysValues, parse_kv_type


def test_a_pair_names_the_type_of_the_keys_first() -> None:
    assert parse_kv_type("q8_0:q4_0") == KeysValues(Q8_0, Q4_0)
    assert parse_kv_type("q4_0") == KeysValues(Q4_0, Q4_0)
    assert str(parse_kv_type("f16:f16")) == "f16"


def test_completion_offers_every_pair_once() -> None:
    assert len(set(KV_CHOICES)) == len(KV_TYPES) ** 2
    for text in KV_CHOICES:
        assert str(parse_kv_type(text)) == text


@pytest.mark.parametrize(
    "text", ["", ":", "q8_0:", ":q4_0", "q8_0:q4_0:f16", "Q8_0", "q8_0 :q4_0", "q5_1", "q8_0,q4_0"]
)
def test_other_texts_are_refused(text: str) -> None:
    assert not _is_valid(text)


def _is_valid(text: str) -> bool:
    try:
        KV_TYPE.parse(text)
    except ValueError:
        return False
    return True


@given(text=st.text(max_size=30))
def test_any_text_is_refused_or_stands_for_two_types(text: str) -> None:
    try:
        types = parse_kv_type(text)
    except ValueError:
        assert isinstance(KV_TYPE.advice(text), str)
    else:
        assert set(types) <= {F16, Q8_0, Q4_0}


@pytest.mark.parametrize(
    ("text", "meant"), [("q8", "q8_0"), ("Q8_0", "q8_0"), ("q8_0/q4_0", "q8_0:q4_0"), ("f16, q4", "f16:q4_0")]
)
def test_misspelled_types_get_a_suggestion(text: str, meant: str) -> None:
    assert KV_TYPE.advice(text) == f"did you mean {meant}?"


@pytest.mark.parametrize("text", ["", "q", "int8", "q8_0 q4_0 f16"])
def test_nothing_is_suggested_for_texts_that_may_mean_anything(text: str) -> None:
    assert KV_TYPE.advice(text) == ""


@pytest.mark.parametrize("size", [64, 96, 128, 512])
def test_scales_take_half_a_bit_per_number(size: int) -> None:
    bits = {name: 8 * kind.position_bytes(size) / size for name, kind in KV_TYPES.items()}
    assert bits == {"f16": 16, "q8_0": 8.5, "q4_0": 4.5}
