"""Tests that every sampler keeps the same candidates as libllama's. `scripts/soak samplers` compares more arrays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest

from llmrun.engine import samplers
from tests.soak.samplers.soak import EQUAL, KINDS, ROUNDING, Case, Different, compare_case, compare_dry

pytestmark = pytest.mark.push

ARRAYS = 60  # for each sampler
LARGEST = 40_000  # tokens in a vocabulary


def compare_many(kind: str, arrays: int, seed: int, results: Counter[str], *, largest: int) -> Iterator[str]:
    """Compare at least this many arrays of logits. Yields a description of each difference."""
    number = 0
    while results.total() < arrays:
        try:
            compare_case(kind, Case(seed, number, largest=largest), results)
        except Different as error:
            results["different"] += 1
            yield f"{kind}, case {number} of seed {seed}: {error}"
        number += 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dry"])
def test_the_same_candidates_are_kept(kind: str) -> None:
    results = Counter[str]()
    assert list(compare_many(kind, ARRAYS, 2, results, largest=LARGEST)) == []
    assert results.total() >= ARRAYS
    assert results[ROUNDING] <= ARRAYS / 10


@pytest.mark.night
def test_dry_penalizes_the_same_tokens() -> None:
    for number in range(ARRAYS):
        assert list(compare_dry(Case(2, number), ["smollm2"])) == [EQUAL]


_SOFTMAX = samplers.softmax  # the original, because a test replaces the name in the module
# What to replace by a wrong function, which is only slightly wrong.
MISTAKES: dict[str, tuple[object, str, object]] = {
    "dry": (samplers, "integer_power", lambda base, n: 1.001 * base**n),
    "top_n_sigma": (samplers, "ordered_sum", lambda x: 1.005 * float(x.sum())),
    "typ_p": (samplers, "softmax", lambda logits: _SOFTMAX(1.003 * logits)),
    "xtc": (samplers, "ordered_sum", lambda x: 1.01 * float(x.sum())),
    "temperature": (samplers, "log", lambda x: 1.001 * math.log(x)),
    "mirostat 1": (samplers, "LN2", 0.69),
    "mirostat 2": (samplers, "LN2", 0.69),
    "adaptive_p": (samplers, "_WIDTH", 0.301),
}


@pytest.mark.night
@pytest.mark.parametrize("kind", MISTAKES)
def test_small_mistakes_are_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISTAKES[kind])
    assert list(compare_many(kind, 300, 2, Counter(), largest=5000))
