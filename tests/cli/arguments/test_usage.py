"""Tests of options whose value may be omitted."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.registry import load


def parsed(*arguments: str) -> dict[str, Any]:
    """Return the parameters of `llmrun chat` that the arguments parse to."""
    with load("chat").make_context("chat", list(arguments)) as context:
        return {name: context.params[name] for name in ("name", "continued", "model", "system")}


@pytest.mark.parametrize(
    ("arguments", "continued", "name"),
    [
        ([], None, None),
        (["--continue"], "", None),
        (["m", "--continue"], "", "m"),
        (["--continue", "x"], "x", None),
        (["--continue=x"], "x", None),
        (["--continue="], "", None),
        (["--continue", "x", "m"], "x", "m"),
        (["m", "--continue", "x"], "x", "m"),
        (["--continue", "-n", "3"], "", None),
        (["-n", "3", "--continue", "x", "-q"], "x", None),
        (["--continue", "--", "m"], "", "m"),
    ],
)
def test_continue_has_a_value_if_a_word_follows(arguments: list[str], continued: str | None, name: str | None) -> None:
    found = parsed(*arguments)
    assert (found["continued"], found["name"]) == (continued, name)


def test_words_after_two_dashes_are_no_options() -> None:
    with pytest.raises(UsageError, match=r"^unexpected argument: --continue$"):
        parsed("--", "m", "--continue")
