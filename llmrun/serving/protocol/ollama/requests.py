"""Converts the bodies of Ollama's API, except those for embeddings, into requests for the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from llmrun.base.amounts import parse_duration
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.images import misplaced
from llmrun.engine.requests import ChatPrompt, FillPrompt, ModelFacts, Prompt, Request, TextPrompt
from llmrun.serving.protocol.declarations import agreed, missing, read
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.images import Images, Piece, content_of, unsupported_images, with_images
from llmrun.serving.protocol.ollama.objects import (
    Loading,
    OllamaAssistantMessage,
    OllamaChatRequest,
    OllamaCommon,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaShowRequest,
    OllamaToolCall,
)
from llmrun.serving.protocol.openai.messages import require_filling, text_of, tools_of
from llmrun.serving.protocol.openai.objects import LARGEST_SEED
from llmrun.serving.protocol.openai.options import (
    Options,
    ThinkingOptions,
    json_schema_format,
    sampling_of,
    seed_of,
    stops_of,
    thinking_of,
)
from llmrun.serving.protocol.openai.requests import ParsedCompletion, chat_logprobs, chat_request, parsed_completion


def message_of(message: OllamaMessage, images: Images, place: str) -> dict[str, Any]:
    """Convert a message to the form of a ChatPrompt. `place` is the path of the message in the body.

    Ollama's clients drop the IDs of calls, so the engine finds the call to which a result belongs by the tool's name.
    """
    pieces = _images_of(message, images, place)
    found: dict[str, Any] = {
        "role": message["role"],
        "content": content_of([*pieces, text_of(message.get("content")) or ""]),
    }
    match message["role"]:
        case "assistant":
            found |= _answer_of(message)
        case "tool":
            names = {"name": message.get("name", message.get("tool_name")), "tool_call_id": message.get("tool_call_id")}
            found |= {field: value for field, value in names.items() if value}
        case "developer":
            found["role"] = "system"  # few templates support the newer role
    return found


def _images_of(message: OllamaMessage, images: Images, place: str) -> list[Piece]:
    given = message.get("images", ())
    if message["role"] == "tool":
        return [images.result_piece({"images": each}, place, partial(_plain, each)) for each in given]
    return [images.part(each, f"{place}.images[{number}]") for number, each in enumerate(given)]


def _plain(source: str) -> tuple[str, str, tuple[str, ...]]:
    return source, "auto", ()


def _answer_of(message: OllamaAssistantMessage) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if given := message.get("tool_calls"):
        found["tool_calls"] = [_call_of(call) for call in given]
    if "thinking" in message:
        found["reasoning_content"] = message["thinking"]
    return found


def _call_of(call: OllamaToolCall) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or "{}"}
    found = {"type": "function", "function": function}
    return {"id": call["id"], **found} if call.get("id") else found


_NO_LIMITS: Final = (-1, -2)  # Ollama's values for no limit and for filling the context; llmrun treats both as no limit


def options_of(given: OllamaCommon, facts: ModelFacts, seed: int) -> Options:
    """Return the common options. `seed` is the default seed. Raises InvalidField."""
    options = given["options"]
    limit = options.get("num_predict", _NO_LIMITS[0])
    return Options(
        sampling=sampling_of(options, facts, "options"),
        seed=seed_of(options, seed),
        stream=given.get("stream", True),
        max_tokens=None if limit in _NO_LIMITS else limit,
        stop=stops_of(options.get("stop")),
        logprobs=chat_logprobs(given.get("logprobs", False), given.get("top_logprobs")),
        response_format=_format_of(given.get("format", "")),
    )


def thinking_options_of(given: OllamaCommon, facts: ModelFacts) -> ThinkingOptions:
    """Convert `think`, which is true, false or a level. Raises InvalidField if the model cannot think."""
    think = given.get("think")
    if think and not facts.thinks:
        raise unsupported("think", f"{facts.name} does not think", hint="leave this field out, or send false")
    if think is None or isinstance(think, str):
        return thinking_of({}, facts, think, "think")
    return thinking_of({"enable_thinking": think}, facts, None, "think")


def keep_alive_of(body: Mapping[str, Any]) -> float | None:
    """Return the `keep_alive` of a body in seconds, infinity for a negative value, or None. Raises InvalidField."""
    given, _ = read(Loading, body)
    value = given.get("keep_alive")
    if isinstance(value, str):
        return parse_duration(value)
    return math.inf if value is not None and value < 0 else value


def lenient(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with `options`, with roles in lower case, and with integers for options such as 8192.0.

    Home Assistant sends integers with a decimal point.
    """
    messages, found = body.get("messages"), {**body, "options": whole_numbers(body.get("options"))}
    if type(messages) is list:
        found["messages"] = [
            {**each, "role": each["role"].lower()} if type(each) is dict and type(each.get("role")) is str else each
            for each in messages
        ]
    return found


def whole_numbers(options: Any) -> Any:
    """Return `options` with integers for numbers such as 8192.0, or an empty object for null."""
    if type(options) is not dict:
        return {} if options is None else options
    return {
        name: int(each) if type(each) is float and each.is_integer() and abs(each) <= LARGEST_SEED else each
        for name, each in options.items()
    }


def unused_context(num_ctx: int, facts: ModelFacts) -> tuple[tuple[str, ...], int]:
    """Return the paths of ignored fields, and a context size to report.

    The size is the model's context size in tokens if the client wants a larger context, or else 0.

    num_ctx  the context size that the client wants; 0 or less for any size
    """
    context = facts.info.context_size
    if num_ctx <= 0 or num_ctx == context:
        return (), 0
    return ("options.num_ctx",), context if num_ctx > context else 0


def _format_of(value: str | dict[str, Any]) -> ResponseFormat | None:
    """Return the format of the answer: JSON, a schema, or None for any text."""
    if isinstance(value, dict):
        return json_schema_format(value, "format")
    return ResponseFormat(FormatKind.JSON_OBJECT, origin="format") if value else None


_NO_TEMPLATE: Final = "this model has no chat template"


def parse_ollama_chat(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of /api/chat. Raises InvalidField.

    A call that only loads the model has no request. `seed` is the default seed.
    """
    given, ignored = read(OllamaChatRequest, lenient(body))
    options, thinking, tools = options_of(given, facts, seed), thinking_options_of(given, facts), tools_of(given, facts)
    messages, images = with_images(
        facts,
        lambda images: [
            message_of(message, images, f"messages[{number}]")
            for number, message in enumerate(given.get("messages", ()))
        ],
    )
    if not messages:
        return _parsed([], replace(options, stream=False), given, ignored, facts)
    if not facts.takes_chats:
        raise unsupported("messages", _NO_TEMPLATE, hint="send a prompt to /api/generate instead")
    if len(messages) > 1 and _says_nothing(messages[-1]):
        messages.pop()  # some clients append an empty answer, which the model is expected to fill
    last = messages[-1]
    continues = last["role"] == "assistant" and last["content"] != "" and not tools.may_be_called
    request = chat_request(messages, tools, thinking, options, images, continues=continues)
    return _parsed([request], options, given, (*tools.left_out, *images.ignored, *ignored), facts)


def _says_nothing(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an empty answer."""
    is_answer = message["role"] == "assistant"
    return is_answer and not any(message.get(part) for part in ("content", "reasoning_content", "tool_calls"))


def parse_generate(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of /api/generate. Raises InvalidField.

    A call that only loads the model has no request. `seed` is the default seed.
    """
    given, ignored = read(OllamaGenerateRequest, lenient(body))
    options = options_of(given, facts, seed)
    prompt, thinking = _prompt_of(given, facts)
    ignored = (*(["think"] if thinking is None and "think" in given else []), *ignored)
    if prompt is None:
        return _parsed([], replace(options, stream=False), given, ignored, facts)
    return _parsed([options.request(prompt, thinking)], options, given, ignored, facts)


def _parsed(
    requests: Sequence[Request], options: Options, given: OllamaCommon, ignored: tuple[str, ...], facts: ModelFacts
) -> ParsedCompletion:
    unused, context = unused_context(given["options"].get("num_ctx", 0), facts)
    return replace(parsed_completion(requests, options, (*unused, *ignored)), context=context)


def _prompt_of(given: OllamaGenerateRequest, facts: ModelFacts) -> tuple[Prompt | None, ThinkingOptions | None]:
    text, system, is_raw = given.get("prompt"), given.get("system"), given.get("raw", False)
    images, seen = given.get("images"), Images(facts)
    if suffix := given.get("suffix"):
        require_filling(facts, "suffix")
        if system or is_raw:
            raise unsupported("suffix", f"cannot be combined with {'raw' if is_raw else 'system'}")
        if images:
            raise unsupported_images("images", misplaced("texts to fill"))
        return FillPrompt(text or "", suffix), None
    if not text and not images:
        return None, None
    if system and (is_raw or not facts.takes_chats):
        raise InvalidField("system", "cannot be combined with raw" if is_raw else _NO_TEMPLATE)
    if images and (is_raw or not facts.takes_chats):
        raise unsupported_images("images", misplaced("raw prompts"))
    if is_raw or not facts.takes_chats:
        return TextPrompt(text or ""), None
    thinking = thinking_options_of(given, facts)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    content = content_of([*(seen.part(each, f"images[{n}]") for n, each in enumerate(images or ())), text or ""])
    messages.append({"role": "user", "content": content})
    return ChatPrompt(messages, template_kwargs=thinking.variables, images=seen.files), thinking


def only_unloads_chat(body: Mapping[str, Any]) -> bool:
    """Return whether a body of /api/chat only unloads the model. Raises InvalidField."""
    return not body.get("messages") and keep_alive_of(body) == 0


def only_unloads_generate(body: Mapping[str, Any]) -> bool:
    """Return whether a body of /api/generate only unloads the model. Raises InvalidField."""
    is_empty = not any(body.get(field) for field in ("prompt", "suffix", "images"))
    return is_empty and keep_alive_of(body) == 0


def parse_show(body: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the model's name in the body of /api/show, and the ignored fields. Raises InvalidField."""
    given, ignored = read(OllamaShowRequest, body)
    names = {"model": given.get("model"), "name": given.get("name")}
    name = agreed({field: each for field, each in names.items() if each})
    if name is None:
        raise missing("model")
    return name, ignored
