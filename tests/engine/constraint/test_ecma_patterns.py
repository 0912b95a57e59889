"""Tests of JavaScript's regular expressions in Python."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.constraint.answer_checks import compile_ecma


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"^\d$", "7", "٣"),
        (r"^\D$", "٣", "7"),
        (r"^\w$", "_", "é"),
        (r"^\W$", "é", "z"),
        (r"^[^\w-]$", "é", "-"),
        (r"^[\W\d]$", "5", "a"),
        (r"^[\D]$", "\U0010ffff", "0"),
        (r"^a$", "a", "a\n"),
        (r"^[$]\$$", "$$", "$"),
        (r"^[[a]$", "[", "b"),
        (r"^[^[a]$", "b", "["),
        (r"^(?<year>\d{4})-(?!13)\d\d$", "2024-12", "2024-13"),
        (r"^(?<=^)\\d$", "\\d", "1"),
        (r"^\s$", "\u00a0", "a"),
        (r"^[\s]\s$", "\ufeff\ufeff", "aa"),
        (r"^\S$", "a", "\ufeff"),
        (r"^\p{L}\p{Nd}$", "é٣", "é²"),
        (r"^[\p{Lu}_]\P{Letter}$", "_²", "_a"),
        (r"^[\P{C}\n]$", "\n", "\t"),
        (r"^\/\-\u00e9$", "/-é", "/-e"),
        ("^.$", "😀", "\n"),
    ],
)
def test_a_pattern_means_what_it_means_in_json_schema(pattern: str, matching: str, other: str) -> None:
    assert compile_ecma(pattern).search(matching)
    assert not compile_ecma(pattern).search(other)


@pytest.mark.parametrize("pattern", ["(", "[", r"\p{Greek}", r"\pL", "a**", "(?<a", "\\"])
def test_what_python_cannot_express_is_an_error(pattern: str) -> None:
    with pytest.raises(re.error):
        compile_ecma(pattern)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # [a--b] may mean something else one day
@given(st.text(alphabet=r"ab[]^$\dDwW-.*(){}1?<é", max_size=12))
def test_any_text_is_a_pattern_or_an_error(pattern: str) -> None:
    with contextlib.suppress(re.error):
        compile_ecma(pattern).search("")
