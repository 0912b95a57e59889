"""Tests of the counted acceptance."""

from __future__ import annotations

import pytest

from llmrun.engine.drafting.base import ANY, Draft, Kind
from llmrun.engine.drafting.pace import Acceptance

ONE: Kind = ("lookup", 2)
OTHER: Kind = ("lookup", 8)
EVERY: Kind = ("lookup", ANY)
ASSUMED = {ONE: 0.4, OTHER: 0.8, EVERY: 0.5}.__getitem__
DRAFT = Draft((1, 2, 3, 4), (ONE, ONE, OTHER, OTHER))


def test_the_assumption_holds_until_something_is_counted() -> None:
    assert Acceptance(ASSUMED).rate(ONE) == pytest.approx(0.4)


def test_tokens_after_the_first_wrong_one_do_not_count() -> None:
    acceptance = Acceptance(ASSUMED)
    for _ in range(200):
        acceptance.observe(DRAFT, 1, found_wrong=True)
    assert acceptance.rate(ONE) == pytest.approx(0.5, abs=0.02)
    assert acceptance.rate(OTHER) == pytest.approx(0.8)


def test_a_draft_cut_short_has_no_wrong_token() -> None:
    acceptance = Acceptance(ASSUMED)
    for _ in range(200):
        acceptance.observe(DRAFT, 2, found_wrong=False)
    assert acceptance.rate(ONE) > 0.95


def test_all_tokens_of_a_drafter_are_counted_together() -> None:
    acceptance = Acceptance(ASSUMED)
    for _ in range(200):
        acceptance.observe(DRAFT, 3, found_wrong=True)
    assert acceptance.rate(EVERY) == pytest.approx(0.75, abs=0.03)


def test_an_answer_begins_with_the_rates_of_the_engine() -> None:
    engine = Acceptance(ASSUMED)
    for _ in range(200):
        engine.observe(DRAFT, 4, found_wrong=False)
    answer = Acceptance(engine.rate)
    assert answer.rate(ONE) == engine.rate(ONE) > 0.9
    for _ in range(6):
        answer.observe(DRAFT, 0, found_wrong=True)
    assert answer.rate(ONE) < 0.5


def test_recent_tokens_count_more() -> None:
    acceptance = Acceptance(ASSUMED)
    for n_right in [0] * 100 + [1] * 100:
        acceptance.observe(DRAFT.first(1), n_right, found_wrong=n_right == 0)
    assert acceptance.rate(ONE) > 0.75
