"""Tests of character classes, and of the pieces that the patterns produce."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.model.tokenizers.kinds import PRE_TOKENIZERS, splitter
from llmrun.model.tokenizers.patterns import LETTERS, MARKS, NUMBERS, PUNCTUATION, SYMBOLS, WHITE_SPACE

# One name for each distinct list of stages.
KINDS = list({rule.stages: name for name, rule in reversed(PRE_TOKENIZERS.items())}.values())


def members(ranges: str) -> set[int]:
    result: set[int] = set()
    for code_points in ranges.split():
        first, _, last = code_points.partition("-")
        result.update(range(int(first, 16), int(last or first, 16) + 1))
    return result


def pieces(name: str, text: str) -> list[str]:
    encoded = text.encode()
    ends = splitter(PRE_TOKENIZERS[name].stages).split(encoded, np.array([len(encoded)] if text else [], np.int64))
    starts = [0, *ends.tolist()]
    return [encoded[start:end].decode() for start, end in zip(starts, ends.tolist(), strict=False)]


@pytest.mark.push
@pytest.mark.parametrize(
    ("ranges", "category"), [(LETTERS, "L"), (NUMBERS, "N"), (PUNCTUATION, "P"), (MARKS, "M"), (SYMBOLS, "S")]
)
def test_classes_are_those_of_this_python_where_both_know_the_character(ranges: str, category: str) -> None:
    """Unicode hardly ever reclassifies characters, so a mistake in the ranges would show as many differences."""
    inside = members(ranges)
    assigned = [code_point for code_point in range(0x110000) if unicodedata.category(chr(code_point)) != "Cn"]
    known = [c for c in assigned if (unicodedata.category(chr(c))[0] == category) != (c in inside)]
    if unicodedata.unidata_version <= "15.1.0":
        assert known == []
    else:  # later assignments are outside our ranges
        oldest = [c for c in known if c in inside]
        assert len(oldest) <= 5


def test_white_space_is_what_python_calls_space_but_for_four_control_characters() -> None:
    separators = {0x1C, 0x1D, 0x1E, 0x1F}
    assert members(WHITE_SPACE) == {c for c in range(0x110000) if chr(c).isspace()} - separators


@pytest.mark.push
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "gpt-2",
            "I'll go, 'tis 1234  x\n\n y",
            ["I", "'ll", " go", ",", " '", "tis", " 1234", " ", " x", "\n\n", " y"],
        ),
        ("gpt-2", "WE'LL  ", ["WE", "'", "LL", "  "]),
        ("llama-bpe", "WE'LL", ["WE", "'LL"]),
        ("llama-bpe", "1234567 a(b) x!\n\n y", ["123", "456", "7", " a", "(b", ")", " x", "!\n\n", " y"]),
        ("llama-bpe", "a  \n \n  b", ["a", "  \n \n", " ", " b"]),
        ("qwen2", "1234 x", ["1", "2", "3", "4", " x"]),
        ("smollm", "a  12 b", ["a", "  ", "1", "2", " b"]),
        ("default", "a.b == 12345'", ["a", ".", "b", " ", "==", " ", "123", "45", "'"]),
        ("default", "1٢3456", ["1٢", "345", "6"]),
        ("llama-bpe", "Straße №5 — \u00a0\u3000é", ["Straße", " №", "5", " —", " \u00a0", "\u3000é"]),
        ("llama-bpe", "e\u0301e \U0001f469\u200d\U0001f680", ["e", "\u0301e", " \U0001f469\u200d\U0001f680"]),
    ],
)
def test_pieces(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


@pytest.mark.push
@pytest.mark.parametrize("name", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_are_the_text_and_none_is_empty(name: str, text: str) -> None:
    result = pieces(name, text)
    assert "".join(result) == text
    assert "" not in result


@pytest.mark.night
@pytest.mark.parametrize("name", KINDS)
def test_no_text_makes_a_pattern_slow(name: str) -> None:
    """Each text would take minutes if a pattern backtracked."""
    for unit in (" ", "\n", " \n", "\t x", "'", "a'", "1", "a1", "é", ".", ". ", "\u00a0"):
        text = unit * (200_000 // len(unit))
        assert "".join(pieces(name, text)) == text
