"""Reads how the model should think, and the format of its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from llmrun.engine.constraint.base import ResponseFormat
from llmrun.engine.facts import ModelFacts
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, missing
from llmrun.serving.protocol.openai import thinking as common
from llmrun.serving.protocol.openai.formats import json_schema_format

KINDS: Final = ("enabled", "disabled", "adaptive")
DISPLAYS: Final = ("summarized", "omitted")
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
# Fields of chat completions -> their names here
_NAMES: Final = {
    "enable_thinking": "thinking",
    "thinking_budget_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking options of a Request, and whether the answer has the text of the thinking."""

    options: common.ThinkingOptions
    shown: bool


def read_thinking(fields: Fields, config: Fields, facts: ModelFacts) -> Thinking:
    """Read `thinking` and the effort in `output_config`. Raises InvalidField.

    Without `thinking`, the model does not think if this can be switched off: many programs expect that the answer
    begins with its text.
    """
    wanted = fields.fields("thinking") or Fields({"type": "disabled"}, "thinking")
    kind = wanted.word("type", KINDS)
    if kind is None:
        raise missing(wanted.path("type"))
    shown = wanted.word("display", DISPLAYS) != "omitted"
    budget = wanted.integer("budget_tokens", 1) if kind == "enabled" else None
    effort = config.word("effort", EFFORTS)
    known: dict[str, Any] = {"enable_thinking": kind != "disabled", "thinking_budget_tokens": budget}
    if kind != "disabled":
        known["reasoning_effort"] = effort
    elif effort is not None:
        known["chat_template_kwargs"] = {"reasoning_effort": effort}  # does not turn thinking on
    options = common.read_thinking(Fields(known, "thinking"), facts)
    return Thinking(replace(options, without_effect=tuple(_NAMES[name] for name in options.without_effect)), shown)


def read_format(fields: Fields, config: Fields) -> ResponseFormat | None:
    """Read the format in `output_config`, or in the older field `output_format`. Raises InvalidField."""
    found = [_json_format(place, name) for place, name in ((config, "format"), (fields, "output_format"))]
    formats = [each for each in found if each is not None]
    if len(formats) > 1:
        raise InvalidField("output_format", "cannot be combined with output_config.format", hint="send only one format")
    return formats[0] if formats else None


def _json_format(place: Fields, name: str) -> ResponseFormat | None:
    wanted = place.fields(name)
    if wanted is None:
        return None
    if wanted.word("type", ("json_schema",)) is None:
        raise missing(wanted.path("type"))
    schema = wanted.object("schema")
    if schema is None:
        raise missing(wanted.path("schema"))
    return json_schema_format(schema, wanted.path("schema"))
