"""Tests that text from a model, file or server cannot control the terminal; `scripts/soak terminal` tests more."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from llmrun.cli.answers.markdown import rows, view
from tests.soak.terminal_soak import Breach, soak_case

pytestmark = pytest.mark.push


@pytest.mark.night
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_hostile_answers_leave_the_terminal_as_it_was(hundred: int) -> None:
    for case in range(100 * hundred, 100 * hundred + 100):
        soak_case(2, case)


@pytest.mark.night
def test_the_check_sees_what_gets_through() -> None:
    """Without the check after Markdown, HTML entities insert control characters."""

    def unchanged(text: str) -> str:
        return text

    breaches = 0
    with patch.object(rows, "visible", unchanged), patch.object(rows, "visible_line", unchanged):
        for case in range(300):
            try:
                soak_case(2, case)
            except Breach:
                breaches += 1
    assert breaches


@pytest.mark.night
def test_one_look_before_markdown_is_not_enough_and_one_after_it_is() -> None:
    def unchanged(text: str) -> str:
        return text.replace("\r", "")  # Markdown reads a carriage return as a line break

    with patch.object(view, "visible", unchanged):
        for case in range(100):
            soak_case(2, case)
