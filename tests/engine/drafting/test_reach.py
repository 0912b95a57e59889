"""Tests of the speed-up that drafts can reach."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.drafting.base import LONGEST_DRAFT
from llmrun.engine.drafting.pace import reachable_speedup

SHARES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("acceptance", "draft", "row", "speedup", "length"),
    [
        (0.75, 0.1, 0.1, 2.734375 / 1.6, 3),  # 1 + 0.75 + 0.75^2 + 0.75^3 tokens in 1.6 steps
        (1.0, 0.0, 0.0, 1 + LONGEST_DRAFT, LONGEST_DRAFT),
        (0.0, 0.1, 0.0, 1.0, 0),
        (0.5, 0.4, 0.2, 1.0, 0),
    ],
)
def test_the_best_length_is_found(acceptance: float, draft: float, row: float, speedup: float, length: int) -> None:
    found = reachable_speedup(acceptance, draft, row)
    assert found[0] == pytest.approx(speedup)
    assert found[1] == length


def test_simulated_answers_are_as_fast() -> None:
    acceptance, draft, row = 0.7, 0.12, 0.08
    speedup, length = reachable_speedup(acceptance, draft, row)
    right = np.random.default_rng(0).random((200_000, length)) < acceptance
    tokens = 1 + np.cumprod(right, axis=1).sum(1).mean()
    assert tokens / (1 + length * (draft + row)) == pytest.approx(speedup, rel=0.01)


@given(acceptance=SHARES, draft=SHARES, row=SHARES)
def test_more_right_tokens_and_cheaper_drafts_never_hurt(acceptance: float, draft: float, row: float) -> None:
    speedup, _ = reachable_speedup(acceptance, draft, row)
    assert 1 <= speedup <= 1 + LONGEST_DRAFT
    assert reachable_speedup(min(1.0, acceptance + 0.1), draft, row)[0] >= speedup
    assert reachable_speedup(acceptance, draft / 2, row)[0] >= speedup
