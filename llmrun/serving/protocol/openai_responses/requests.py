"""Converts the body of a call of the Responses API into a request for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import AUTO, Request
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, seen
from llmrun.serving.protocol.openai.adapters import read_adapters
from llmrun.serving.protocol.openai.formats import read_text_format
from llmrun.serving.protocol.openai.options import (
    MOST_LOGPROBS,
    leave_obfuscation,
    leave_quiet,
    read_stop,
    refuse_values,
    require_chats,
)
from llmrun.serving.protocol.openai.requests import chat_request
from llmrun.serving.protocol.openai.sampling import read_sampling, read_seed
from llmrun.serving.protocol.openai.thinking import read_thinking
from llmrun.serving.protocol.openai.tools import ToolOptions, read_tools
from llmrun.serving.protocol.openai_responses.conversation import read_conversation
from llmrun.serving.protocol.parsed import Parsed

LOGPROBS: Final = "message.output_text.logprobs"
_STATELESS: Final = "this server stores no responses: send the whole conversation in `input`"
_TO_LIMIT: Final = "use `max_output_tokens`"
_ONE: Final = "send several requests with different seeds"
# Unsupported fields that would change the answer -> the values that are accepted, and advice. The last ones belong to
# chat completions; a client that sends them here would not get what it wants.
REFUSED_IN_RESPONSES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "min_tokens": ((0,), "ban the end tokens with `ignore_eos`, and set `max_output_tokens`"),
    "use_beam_search": ((False,), _ONE),
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "store": ((False,), _STATELESS),
    "background": ((False,), "this server stores no responses: use `stream` to get the answer while it is generated"),
    "prompt": ((), "send the text of the prompt in `instructions` and `input`"),
    "truncation": (("disabled",), "this server never truncates conversations: leave out old items"),
    "context_management": (([],), "this server never truncates conversations: leave out old items"),
    "moderation": ((), ""),
    "messages": ((), "use `input`"),
    "response_format": ((), "use `text.format`"),
    "reasoning_effort": ((), "use `reasoning.effort`"),
    "max_tokens": ((), _TO_LIMIT),
    "max_completion_tokens": ((), _TO_LIMIT),
    "n_predict": ((), _TO_LIMIT),
    "n": ((1,), _ONE),
}
_REFUSED_IN_TEXT: Final = {"verbosity": (("medium",), "ask for a short or a long answer in `instructions`")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(Parsed):
    """The only request of a call.

    settings  the settings that the answer repeats, with defaults for missing fields
    """

    seed: int
    settings: Mapping[str, Any]

    @property
    def request(self) -> Request:
        return self.requests[0]


def parse_response(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedResponse:
    """Convert the body of a call. Raises InvalidField.

    seed  the seed if the body has none
    """
    fields = Fields(body)
    fields.text("model")  # already used to find the model
    refuse_values(fields, REFUSED_IN_RESPONSES)
    leave_quiet(fields)
    require_chats(facts, "input")
    messages = read_conversation(fields)
    tools = read_tools(fields, facts, flat=True)
    reasoning, text = (fields.fields(name) or Fields({}, name) for name in ("reasoning", "text"))
    thinking = read_thinking(fields, facts, reasoning)
    wanted = read_text_format(fields, text)
    refuse_values(text, _REFUSED_IN_TEXT)
    included = _read_include(fields)
    seed = read_seed(fields, seed)
    request = chat_request(
        messages,
        tools,
        thinking,
        wanted,
        max_tokens=fields.integer("max_output_tokens", 1),
        stop=read_stop(fields, "stop"),
        sampling=replace(read_sampling(fields, facts), seed=seed),
        logprobs=_logprobs(fields, LOGPROBS in included),
    )
    return ParsedResponse(
        requests=(replace(request, adapters=read_adapters(fields, facts)),),
        stream=_streams(fields),
        seed=seed,
        settings=_settings(fields, request, tools, reasoning, text),
        ignored=(
            *thinking.without_effect,
            *(f"include.{name}" for name in included if name != LOGPROBS),
            *fields.unread(),
        ),
    )


def _streams(fields: Fields) -> bool:
    options = fields.fields("stream_options")
    if options is not None:
        leave_obfuscation(options)
    return bool(fields.boolean("stream"))


def _read_include(fields: Fields) -> list[str]:
    """Return the optional parts of the answer in `include`. Most belong to tools that this server does not have."""
    names = fields.items("include") or []
    for number, name in enumerate(names):
        if type(name) is not str:
            raise InvalidField(f"include[{number}]", f"expected a string, got {seen(name)}", code="invalid_type")
    return names


def _logprobs(fields: Fields, wanted: bool) -> int | None:
    """Return how many of the likeliest tokens are wanted at each position, or None."""
    most = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if most and not wanted:
        raise InvalidField("top_logprobs", f'needs "{LOGPROBS}" in include')
    return most or 0 if wanted else None


def _settings(fields: Fields, request: Request, tools: ToolOptions, reasoning: Fields, text: Fields) -> dict[str, Any]:
    """Return the settings that every answer repeats. Raises InvalidField for those that nothing else reads."""
    sampling = request.sampling
    return {
        "background": False,
        "instructions": fields.peek("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 1),  # for hosted tools, of which there are none
        "metadata": _metadata(fields),
        "parallel_tool_calls": tools.parallel,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.peek("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "text": {"format": _format(text), "verbosity": "medium"},
        "tool_choice": fields.peek("tool_choice") or AUTO,
        "tools": [*map(_tool, fields.peek("tools") or ())],
        "top_logprobs": request.logprobs or 0,
        "truncation": "disabled",
        **{name: fields.peek(name) for name in ("user", "safety_identifier", "prompt_cache_key")},
    }


def _metadata(fields: Fields) -> Mapping[str, Any]:
    metadata = fields.object("metadata") or {}
    if not all(type(value) is str for value in metadata.values()):
        raise InvalidField("metadata", "expected an object whose values are strings", code="invalid_type")
    return metadata


def _format(text: Fields) -> Mapping[str, Any]:
    wanted = text.peek("format") or {"type": "text"}
    return {"name": "", "description": None, "strict": False, **wanted} if "schema" in wanted else wanted


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}
