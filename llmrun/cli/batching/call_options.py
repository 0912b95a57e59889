"""Turns flags and settings into the fields that the calls of a batch get."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.formats import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX
from llmrun.cli.arguments.parsing import parse_stops
from llmrun.engine.constraint.grammars import schema_of
from llmrun.jobs.batching.requests import CallOptions, Default, Fill
from llmrun.options.sampling_params import SAMPLING
from llmrun.serving.protocol.openai.thinking import BUDGETS

if TYPE_CHECKING:
    from llmrun.cli.arguments.flags import AnswerFlags
    from llmrun.cli.prompting.template import PromptTemplate
    from llmrun.engine.constraint.base import ResponseFormat
    from llmrun.options.settings import Settings

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict")
_VARIABLES: Final = ("chat_template_kwargs", "enable_thinking", "reasoning_effort")
_FORMATS: Final = ("response_format", "structured_outputs", "json_schema", "grammar", "tools")


def call_options(
    flags: AnswerFlags,
    settings: Settings,
    *,
    prompting: PromptTemplate | None,
    params: Mapping[str, str],
    variables: Mapping[str, Any],
    response_format: ResponseFormat | None,
) -> CallOptions:
    """Return the options of a batch's calls. A line's own fields take precedence.

    prompting  the prompt template that the fields of a line fill in, or None
    params     values for all lines
    variables  variables for the chat template
    """
    system = settings.system if flags.system is None else flags.system
    defaults = (
        *_sampling(settings),
        *_others(flags, settings, variables),
        *([] if response_format is None else [_format(response_format)]),
    )
    if prompting is None:
        return CallOptions(settings.seed or 0, defaults, system)
    text = json.dumps([prompting.prompt, prompting.system, dict(prompting.defaults), dict(params), system])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return CallOptions(settings.seed or 0, defaults, system, _filling(prompting, params, system), digest)


def _sampling(settings: Settings) -> Iterator[Default]:
    for name, value in settings.sampling.items():
        parameter = SAMPLING[name]
        yield Default(parameter.wire or (name,), parameter.wire_value(value))


def _others(flags: AnswerFlags, settings: Settings, variables: Mapping[str, Any]) -> Iterator[Default]:
    if settings.token_limit is not None:
        yield Default(_LIMITS, settings.token_limit)
    if flags.stop:
        yield Default(("stop",), [*parse_stops(flags.stop)])
    think = False if settings.think_budget == 0 else settings.think
    switches = {} if think is None else {"enable_thinking": think, "thinking": think}  # each template knows one of them
    if switches or variables:
        yield Default(_VARIABLES, {**switches, **variables})
    if settings.think_budget:
        yield Default(BUDGETS, settings.think_budget)


def _format(wanted: ResponseFormat) -> Default:
    """Return the field for a format. Only llmrun and vLLM know the formats that are not JSON."""
    kind = wanted.kind.value
    if kind == JSON_OBJECT:
        return Default(_FORMATS, {"type": "json_object"})
    if kind == JSON_SCHEMA:
        schema = {"name": "answer", "schema": schema_of(wanted), "strict": True}
        return Default(_FORMATS, {"type": "json_schema", "json_schema": schema})
    value = {REGEX: wanted.text, GRAMMAR: wanted.text, CHOICE: [*wanted.choices]}[kind]
    first, second, *others = _FORMATS
    return Default((second, first, *others), {kind: value})


def _filling(prompting: PromptTemplate, params: Mapping[str, str], system: str | None) -> Fill:
    def fill(fields: Mapping[str, Any]) -> tuple[str, str | None]:
        values = {**params, **{name: _value(name, value) for name, value in fields.items()}}
        asked = values.pop("input", "")
        if prompting.needs_input and not asked:
            raise UsageError(f"template {prompting.name}: the line has no field input")
        try:
            prompting.check_complete(values)
        except UsageError as error:
            raise UsageError(str(error)) from None  # its hint is about the command, not about a line
        prompt, own = prompting.filled(asked, values)
        return prompt, system if own is None else own

    return fill


def _value(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if type(value) in (int, float, bool):
        return json.dumps(value)
    raise UsageError(f"{name}: a list or an object cannot be filled into a template")
