"""Tests that patterns mean what `re` takes them to mean, and that sets of code points behave as sets."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.model.tokenizers import patterns as patterns_module
from llmrun.model.tokenizers.kinds import PRE_TOKENIZERS, Stage, splitter
from llmrun.model.tokenizers.patterns import parse

ATOMS = ["a", "b", "é", r"\s", r"\S", r"\n", "[ab]", "[^a]", r"[^\s]", r"[a\-é]", "[a-c]", r"\.", r"\|"]
atoms = st.sampled_from(ATOMS)
repeated = st.builds(str.__add__, atoms, st.sampled_from(["", "?", "*", "+", "{2}", "{1,3}", "{0,2}"]))


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3)
    group = several.map(lambda parts: f"(?:{'|'.join(parts)})")
    # Only single atoms repeat without a limit, because llama.cpp's patterns never nest unlimited repetitions of what
    # may be empty.
    return several.map("".join) | group | st.builds(str.__add__, group, st.sampled_from(["?", "{1,2}"]))


patterns = st.recursive(repeated, grown, max_leaves=6)
texts = st.text("aabbcé .|-\n", max_size=20)


def cut_by_re(pattern: str, text: str) -> list[str]:
    """Return what `re` matches, and the text between the matches."""
    cuts = {0, len(text)}
    start = 0
    while start < len(text):
        match = re.compile(pattern).match(text, start)
        if match is None or match.end() == start:
            start += 1
            continue
        cuts |= {start, match.end()}
        start = match.end()
    ordered = sorted(cuts)
    return [text[first:after] for first, after in pairwise(ordered)]


def cut_by_us(stages: tuple[Stage, ...], text: str) -> list[str]:
    encoded = text.encode()
    ends = splitter(stages).split(encoded, np.array([len(encoded)] if text else [], np.int64)).tolist()
    return [encoded[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.push
@given(
    pattern=patterns, ends=st.sampled_from(["", r"(?!\S)"]), others=st.sampled_from(["", r"|a+b", r"|\s"]), text=texts
)
def test_the_first_match_is_the_one_that_re_finds(pattern: str, ends: str, others: str, text: str) -> None:
    whole = pattern + ends + others
    assert cut_by_us((Stage(whole),), text) == cut_by_re(whole, text)


@pytest.mark.parametrize("pattern", ["a)", "(?:a", "[a", r"\w", "a{2", "[b-a]", "\\", "[a-\\s]"])
def test_a_pattern_beyond_the_notation_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        parse(pattern)


@pytest.mark.push
@pytest.mark.parametrize("stage", sorted({stage.pattern for rule in PRE_TOKENIZERS.values() for stage in rule.stages}))
def test_no_pattern_of_ours_matches_nothing(stage: str) -> None:
    """An empty match would be skipped."""
    assert cut_by_us((Stage(stage),), "") == []


members = st.frozensets(st.integers(0, 40))


def of(some: frozenset[int]) -> patterns_module.CodePoints:
    empty = np.empty(0, np.int64)
    return patterns_module.union(empty, *(patterns_module.span(one, one) for one in some))


def listed(one: patterns_module.CodePoints, limit: int = 41) -> frozenset[int]:
    return frozenset(np.flatnonzero(patterns_module.contains(one, np.arange(limit))).tolist())


@given(members, members)
def test_sets_of_code_points_are_sets(first: frozenset[int], second: frozenset[int]) -> None:
    one, other = of(first), of(second)
    assert listed(one) == first
    assert listed(patterns_module.union(one, other)) == first | second
    assert listed(patterns_module.intersection(one, other)) == first & second
    assert listed(patterns_module.complement(one)) == frozenset(range(41)) - first
    assert listed(patterns_module.complement(patterns_module.complement(one))) == first


@given(st.lists(members, min_size=1, max_size=5))
def test_code_points_have_one_symbol_if_no_set_tells_them_apart(several: list[frozenset[int]]) -> None:
    table, membership = patterns_module.symbols_of([of(one) for one in several])
    for code_point in range(41):
        assert [bool(row[table[code_point]]) for row in membership] == [code_point in one for one in several]
    assert len({tuple(code_point in one for one in several) for code_point in range(42)}) == membership.shape[1]


@pytest.mark.push
def test_sets_of_code_points_are_built_without_masked_arrays() -> None:
    """Importing numpy.ma takes 10 to 18 ms, which would delay the first token."""
    code = (
        "import sys; from llmrun.model.tokenizers.patterns import complement, intersection, span, symbols_of, union\n"
        "letters = union(span(65, 90), span(97, 122))\n"
        "symbols_of([letters, intersection(letters, span(70, 99)), complement(letters)])\n"
        "print('numpy.ma' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
