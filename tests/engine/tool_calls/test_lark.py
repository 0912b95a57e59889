"""Tests of the JSON schemas in the grammar of tool calls."""

from __future__ import annotations

import pytest

from llmrun.base.errors import UsageError
from llmrun.engine.tool_calls import grammar as grammar_module
from tests.support.constraint.matchers import accepts, byte_tokenizer, matcher


@pytest.mark.parametrize(("day", "exists"), [("2024-02-29", True), ("2023-02-29", False)])
def test_dates_in_arguments_exist(day: str, exists: bool) -> None:
    grammar = f"start: {grammar_module.json_matching({'properties': {'day': {'format': 'date'}}}, None, 'the tool')}"
    assert accepts(matcher(byte_tokenizer(), grammar), list(f'{{"day": "{day}"}}'.encode())) == exists


@pytest.mark.parametrize("value", [float("nan"), object(), "\ud800"])
def test_a_schema_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="schema cannot be written as JSON: the tool"):
        grammar_module.json_matching({"const": value}, None, "the tool")
