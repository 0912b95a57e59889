"""Converts a request to the JSON of OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.grammars import schema_of
from llmrun.engine.requests import (
    AUTO,
    NONE,
    REQUIRED,
    ChatPrompt,
    FillPrompt,
    Request,
    TextPrompt,
    TokenPrompt,
    check_request,
)
from llmrun.options.sampling_params import SAMPLING

_ANY_TOKEN = 1 << 31  # an upper bound for token IDs, because the size of the server's vocabulary is unknown


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """The JSON of a request. `body` contains fields of OpenAI's API, `extras` fields that only some servers accept."""

    path: str
    body: dict[str, Any]
    extras: dict[str, Any]


def remote_request(request: Request, model: str, *, ignore_eos: bool) -> RemoteRequest:
    """Return the JSON to send. Raises UsageError if the request is invalid or not supported by servers."""
    check_request(request, _ANY_TOKEN)
    if request.think_budget:
        raise UsageError(
            "--think-budget: servers do not support thinking budgets",
            hint="use 0 to turn thinking off, or set a budget when you start the server",
        )
    prompt, sampling = request.prompt, request.sampling
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_sampling_fields(request, openai=True),
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if request.response_format is not None:
        body["response_format"] = _response_format(request.response_format)
    if request.stop:
        body["stop"] = [*request.stop]
    if sampling.logit_bias:
        # OpenAI's range is -100 (ban) to 100 (force), and JSON has no infinity.
        body["logit_bias"] = {str(token): max(-100.0, min(100.0, bias)) for token, bias in sampling.logit_bias.items()}
    extras = _sampling_fields(request, openai=False) | ({"ignore_eos": True} if ignore_eos else {})
    if not isinstance(prompt, ChatPrompt):
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        return RemoteRequest("/completions", body | _prompt_fields(prompt), extras)
    if not prompt.add_generation_prompt:
        raise UsageError("servers cannot continue a partial answer: add_generation_prompt must be True")
    if request.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.logprobs}
    if prompt.tools:
        body |= {"tools": [*prompt.tools], "tool_choice": _tool_choice(prompt)}
        if not prompt.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    variables = _thinking_variables(request) | dict(prompt.template_kwargs)
    # Template variables are sent in the body and not as extras, because extras are dropped if the server rejects them,
    # and the answer would then not be what the user asked for.
    if variables:
        body["chat_template_kwargs"] = variables
    # Earlier thinking is not sent back, because some servers reject it.
    body["messages"] = [
        {name: value for name, value in message.items() if name != "reasoning_content"} for message in prompt.messages
    ]
    return RemoteRequest("/chat/completions", body, extras)


def _prompt_fields(prompt: TextPrompt | TokenPrompt | FillPrompt) -> dict[str, Any]:
    if isinstance(prompt, FillPrompt):
        if prompt.files or prompt.line or prompt.cut:
            raise UsageError("servers fill only the gap between two texts: files, line and cut are not supported")
        return {"prompt": prompt.prefix, "suffix": prompt.suffix}
    return {"prompt": prompt.text if isinstance(prompt, TextPrompt) else [*prompt.tokens]}


def _tool_choice(prompt: ChatPrompt) -> str | dict[str, Any]:
    if prompt.tool_choice in (AUTO, NONE, REQUIRED):
        return prompt.tool_choice
    return {"type": "function", "function": {"name": prompt.tool_choice}}


def _response_format(wanted: ResponseFormat) -> dict[str, Any]:
    """Return OpenAI's `response_format`, which is sent in the body because a server must not ignore it."""
    if wanted.kind is FormatKind.JSON_OBJECT:
        return {"type": "json_object"}
    if wanted.kind is not FormatKind.JSON_SCHEMA:
        raise UsageError(
            f"{wanted.origin}: not supported for models on a server",
            hint="OpenAI's API has only JSON schemas and JSON objects",
        )
    schema = {"name": "answer", "schema": schema_of(wanted), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _thinking_variables(request: Request) -> dict[str, Any]:
    """Return the template variables that switch thinking on or off. Each template uses one and ignores the other."""
    think = False if request.think_budget == 0 else request.think
    return {} if think is None else {"enable_thinking": think, "thinking": think}


def _sampling_fields(request: Request, *, openai: bool) -> dict[str, Any]:
    """Return the sampling fields that are part of OpenAI's API, or those that only other servers accept.

    A parameter is sent even if its value disables it, because the server may enable it by default. For example,
    llama-cpp-python has a default repeat penalty of 1.1. The optional parameters are off by default on servers, so they
    are sent only if they were chosen or differ from our default.
    """
    return {
        field: parameter.wire_value(getattr(request.sampling, name))
        for name, parameter in SAMPLING.items()
        if parameter.openai is openai and request.sends(name)
        if not parameter.optional
        or request.sent_sampling is not None
        or getattr(request.sampling, name) != parameter.default
        for field in parameter.wire
    }
