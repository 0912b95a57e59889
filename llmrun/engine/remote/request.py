"""Parses the address of a model on a server, and converts requests for it to the JSON of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from llmrun.base.errors import UsageError, shown
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import (
    AUTO,
    NONE,
    REQUIRED,
    ChatPrompt,
    FillPrompt,
    MixedPrompt,
    Request,
    TextPrompt,
    TokenPrompt,
    check_request,
    is_image,
)
from llmrun.options.sampling_params import SAMPLING

_EXAMPLE = "example: http://127.0.0.1:8080/v1#MODEL"


class Endpoint(Struct, frozen=True):
    """An OpenAI-compatible server and a model on it.

    base   the prefix of all URLs of the server, such as "http://127.0.0.1:8080/v1"
    model  the name of the model; empty for the server's only one
    host   the host, and the port if one was given, such as "127.0.0.1:8080"
    """

    base: str
    model: str
    host: str
    is_loopback: bool

    @property
    def address(self) -> str:
        """The endpoint in the form `URL#MODEL`, which `parse_endpoint` accepts."""
        return f"{self.base}#{self.model}" if self.model else self.base


_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_ADDRESS = r"(?:localhost|\d+(?:\.\d+){3}|\[[\da-f:.]+\])(?::\d+)?"
# After a host name, the port needs at least 4 digits and must not be a date, because NAME:TAG is a model: its tag is a
# size, or a date such as 2507.
_DATE = r"(?:0\d\d\d|1[0-2](?:[0-2]\d|3[01])|2[3-6]\d\d)(?!\d)"
_NAME = rf"[a-z\d](?:[a-z\d.-]*[a-z\d])?:(?!{_DATE})\d{{4,5}}"
_BARE = re.compile(rf"(?:{_ADDRESS}|{_NAME})(?![^/#])", re.IGNORECASE)
_FILE = re.compile(r"https?://(?:(?:www\.)?(?:huggingface\.co|hf\.co)/|[^?#]*\.gguf(?![^?#]))", re.IGNORECASE)
# The routes whose URLs people copy from the documentation of servers
_ROUTE = re.compile(r"/(?:(?:chat/)?completions|responses|messages|embeddings|models|api/(?:chat|generate|tags))\Z")
_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # servers listen on these addresses, but Windows cannot connect


def is_endpoint(name: str) -> bool:
    """Return whether a name is the address of a server, such as http://HOST:PORT/v1#MODEL, HOST:PORT or [::1]:PORT.

    URLs of .gguf files and of pages of the Hugging Face Hub are not: they name models to download.
    """
    return bool((_SCHEME.match(name) and not _FILE.match(name)) or _BARE.match(name))


def parse_endpoint(name: str) -> Endpoint:
    """Parse `URL#MODEL`. Raises UsageError, whose message never contains a password from the URL.

    The scheme may be missing, and the path may be that of a route, such as /v1/chat/completions.
    """
    from urllib.parse import urlsplit

    url, _, model = name.partition("#")
    if _BARE.match(url):
        url = f"http://{url}"
    if "@" in url:
        raise UsageError(
            "endpoint: the URL must not contain a user name or password",
            hint="set LLMRUN_API_KEY instead, which is sent as a Bearer token and never shown",
        )
    if not url.isprintable() or " " in url or not model.isprintable():
        raise UsageError(f"endpoint: {shown(name)}: contains a character that is not allowed in a URL", hint=_EXAMPLE)
    try:
        parts = urlsplit(url)
        host, port = _UNSPECIFIED.get(parts.hostname or "", parts.hostname), parts.port
    except ValueError as error:
        raise UsageError(f"endpoint: {shown(url)}: {error}", hint=_EXAMPLE) from None
    if not _SCHEME.match(url) or not host:
        raise UsageError(f"endpoint: {shown(url)}: not an http or https URL with a host", hint=_EXAMPLE)
    if "?" in url:
        raise UsageError(
            f"endpoint: {shown(parts.hostname or '')}: the URL must not contain a query (?...)", hint=_EXAMPLE
        )
    path = _ROUTE.sub("", re.sub("/+", "/", parts.path).removesuffix("/"))
    # OpenAI's API is at /v1. A path that already contains a version (/api/paas/v4, /v1beta/openai) is complete.
    versioned = any(re.fullmatch(r"v\d\w*", part) for part in path.split("/"))
    named = f"[{host}]" if ":" in host else host
    where = named if port is None else f"{named}:{port}"
    return Endpoint(
        base=f"{parts.scheme}://{where}{path if versioned else path + '/v1'}",
        model=model.strip(),
        host=where,
        is_loopback=is_loopback(host),
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host. IPv6 addresses have no brackets."""
    import ipaddress  # This import takes 2 ms, and most commands do not need it.

    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_ANY_TOKEN = 1 << 31  # an upper bound for token IDs, because the size of the server's vocabulary is unknown


class RemoteRequest(Struct, frozen=True):
    """The JSON of a request: OpenAI's fields in `body`, and fields that only some servers accept in `extras`."""

    path: str
    body: dict[str, Any]
    extras: dict[str, Any]


def remote_request(request: Request, model: str, *, ignore_eos: bool) -> RemoteRequest:
    """Return the JSON to send. Raises UsageError if the request is invalid or not supported by servers."""
    check_request(request, _ANY_TOKEN)
    if request.think_budget:
        raise UsageError(
            "--think-budget: not supported for models on a server",
            hint="use 0 to turn thinking off, or set a budget in a preset of the server",
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
    messages = _with_data_urls(prompt) if prompt.images else prompt.messages
    body["messages"] = [
        {name: value for name, value in message.items() if name != "reasoning_content"} for message in messages
    ]
    return RemoteRequest("/chat/completions", body, extras)


def _with_data_urls(prompt: ChatPrompt) -> list[Mapping[str, Any]]:
    """Return the messages with their images as data URLs."""
    from base64 import b64encode

    from llmrun.formats.images.header import read_header

    kinds = {key: read_header(file, "image").format.lower() for key, file in prompt.images.items()}
    urls = {key: f"data:image/{kinds[key]};base64,{b64encode(file).decode()}" for key, file in prompt.images.items()}

    def sent(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if not is_image(part):
            return part
        detail = {"detail": part["detail"]} if "detail" in part else {}
        return {"type": "image_url", "image_url": {"url": urls[part["image"]], **detail}}

    contents = (message.get("content") for message in prompt.messages)
    return [
        {**message, "content": [*map(sent, content)]} if isinstance(content, list | tuple) else message
        for message, content in zip(prompt.messages, contents, strict=True)
    ]


def _prompt_fields(prompt: TextPrompt | TokenPrompt | MixedPrompt | FillPrompt) -> dict[str, Any]:
    if isinstance(prompt, MixedPrompt):
        raise UsageError("servers do not support prompts that mix texts and token IDs")
    if isinstance(prompt, FillPrompt):
        if prompt.files or prompt.line or prompt.cut:
            raise UsageError("servers fill only the gap between two texts: files, line and cut are not supported")
        return {"prompt": prompt.prefix, "suffix": prompt.suffix}
    if isinstance(prompt, TokenPrompt):
        return {"prompt": [*prompt.tokens]}
    if prompt.images:
        from llmrun.engine.images import misplaced

        raise misplaced("raw prompts for servers")
    return {"prompt": prompt.text}


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
    from llmrun.engine.constraint.closing import openai_json_schema  # most runs have no schema
    from llmrun.engine.constraint.matcher import schema_of

    return {"type": "json_schema", "json_schema": openai_json_schema(schema_of(wanted))}


def _thinking_variables(request: Request) -> dict[str, Any]:
    """Return the template variables that switch thinking on or off. A template ignores unknown variables."""
    think = False if request.think_budget == 0 else request.think
    return {} if think is None else {"enable_thinking": think, "thinking": think}


def _sampling_fields(request: Request, *, openai: bool) -> dict[str, Any]:
    """Return the sampling fields that are part of OpenAI's API, or the fields that only other servers accept.

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
