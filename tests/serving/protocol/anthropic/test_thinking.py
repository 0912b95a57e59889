"""Tests of the fields about thinking and the format of the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.constraint.base import FormatKind
from llmrun.serving.protocol.errors import InvalidField
from tests.support.protocol.answers import FACTS
from tests.support.protocol.anthropic_answers import TOOL, message, prompt_of

SIMPLE = structs.replace(FACTS, thinks=False)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, (False, None, True)),
        ({"type": "disabled"}, (False, None, True)),
        ({"type": "enabled", "budget_tokens": 1024}, (True, 1024, True)),
        ({"type": "enabled"}, (True, None, True)),
        ({"type": "adaptive"}, (True, None, True)),
        ({"type": "adaptive", "display": "summarized"}, (True, None, True)),
        ({"type": "adaptive", "display": "updates"}, (True, None, True)),
        ({"type": "adaptive", "display": "omitted"}, (True, None, False)),
    ],
)
def test_thinking_is_switched(thinking: Any, expected: tuple[bool, int | None, bool]) -> None:
    parsed = message(thinking=thinking)
    assert (parsed.request.think, parsed.request.think_budget, parsed.shows_thinking) == expected
    assert parsed.ignored == ()


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive"}])
def test_the_effort_is_a_variable_of_the_template(thinking: Any) -> None:
    fields = {"thinking": thinking, "output_config": {"effort": "high"}}
    assert prompt_of(**fields).template_kwargs == {"reasoning_effort": "high"}
    assert message(**fields).request.think is (thinking == {"type": "adaptive"})


def test_models_that_cannot_think_name_the_fields() -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "low"}}
    parsed = message(SIMPLE, **fields)
    assert {*parsed.ignored} == {"thinking", "thinking.budget_tokens", "output_config.effort"}
    assert parsed.request.think is None
    assert message(SIMPLE).ignored == ()


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
def test_the_answer_has_a_format(fields: dict[str, Any]) -> None:
    wanted = message(**fields).request.response_format
    assert wanted is not None
    assert (wanted.kind, json.loads(wanted.text)) == (FormatKind.JSON_SCHEMA, SCHEMA)
    assert message(**fields).ignored == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"format": {"schema": SCHEMA}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format"),
        ({"output_format": FORMAT, "tools": [TOOL]}, "output_format.schema"),
    ],
)
def test_invalid_values_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        message(**fields)
    assert caught.value.param == param


def test_formats_are_allowed_beside_tools_that_are_not_called() -> None:
    assert message(output_format=FORMAT, tools=[TOOL], tool_choice={"type": "none"}).request.response_format
