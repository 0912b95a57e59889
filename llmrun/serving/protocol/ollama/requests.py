"""Converts the bodies of Ollama's /api/chat and /api/generate into requests for the engine.

The messages of a chat are converted to the form of chat completions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from llmrun.base.amounts import parse_duration
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import ChatPrompt, FillPrompt, ModelFacts, Prompt, TextPrompt
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, seen
from llmrun.serving.protocol.openai.messages import read_messages, read_tools, require_filling
from llmrun.serving.protocol.openai.options import (
    Options,
    ThinkingOptions,
    json_schema_format,
    read_sampling,
    read_seed,
    read_stop,
    read_thinking,
)
from llmrun.serving.protocol.openai.requests import (
    ParsedCompletion,
    chat_request,
    parsed_completion,
    read_chat_logprobs,
)


def read_ollama_messages(fields: Fields) -> tuple[Sequence[Mapping[str, Any]], tuple[str, ...]]:
    """Return the conversation of a ChatPrompt, and the paths of ignored fields. Raises InvalidField.

    The conversation is empty if there are no messages.
    """
    given = fields.item_fields("messages")
    if not given:
        return (), ()
    calls = _Calls()
    converted = Fields({"messages": [_converted(message, calls) for message in given]})
    return read_messages(converted), converted.unread()


def refuse_images(fields: Fields) -> None:
    """Raise InvalidField if there are images."""
    if fields.items("images"):
        raise unsupported(fields.path("images"), "this server does not read images", hint="send text only")


def _converted(message: Fields, calls: _Calls) -> dict[str, Any]:
    """Return a message with the field names of chat completions. Fields with identical names are copied unchanged."""
    refuse_images(message)
    role = (message.text("role") or "").lower() or None
    content = message.value("content")
    found: dict[str, Any] = {"role": role, "content": "" if content is None else content}
    if role == "assistant":
        found["reasoning_content"] = message.text("thinking")
        found["tool_calls"] = [_converted_call(call, calls) for call in message.item_fields("tool_calls") or ()]
    elif role == "tool":
        found["name"] = message.text("tool_name")
        found["tool_call_id"] = calls.answered(message, found["name"])
    return {**found, **message.rest()}


def _converted_call(call: Fields, calls: _Calls) -> dict[str, Any]:
    call_id, function = call.text("id"), call.value("function")
    if isinstance(function, dict):
        function = {name: value for name, value in function.items() if name != "index"}
        call_id = calls.asked(call_id, function.get("name"))
    return {"id": call_id, "function": function, **call.rest()}


class _Calls:
    """A conversation's tool calls that have no result yet.

    Ollama's clients drop the IDs of calls. A result without an ID belongs to the first call of the named tool, or to
    the first call of any tool if the result names no tool.
    """

    def __init__(self) -> None:
        self._open: dict[str, object] = {}  # maps the ID of a call to the name of the tool
        self._asked = 0

    def asked(self, call_id: str | None, name: object) -> str:
        """Add a call, and return the call's ID."""
        self._asked += 1
        found = call_id or f"call_{self._asked}"
        self._open[found] = name
        return found

    def answered(self, result: Fields, name: str | None) -> str:
        """Return the ID of the call that a result belongs to. Raises InvalidField if there is no such call."""
        call_id = result.text("tool_call_id")
        if call_id is None:
            call_id = next((known for known, tool in self._open.items() if name in (None, tool)), None)
        if call_id is None:
            of_tool = "" if name is None else f" of {seen(name)}"
            raise InvalidField(result.place, f"there is no tool call{of_tool} before this result")
        self._open.pop(call_id, None)
        return call_id


LEVELS: Final = ("low", "medium", "high", "max")
_NO_LIMITS: Final = (-1, -2)  # Ollama's values for no limit and for filling the context; llmrun treats both as no limit
_JSON: Final = "json"
# Options that drop messages or the beginning of a full context, which this server never does.
_CUTS: Final = ("truncate", "shift")
_LONGEST_DURATION: Final = 60  # characters


def read_ollama_options(fields: Fields, facts: ModelFacts, seed: int) -> tuple[Options, tuple[str, ...]]:
    """Return the common options, and the paths of ignored options. Raises InvalidField.

    seed  the default seed
    """
    fields.text("model")  # the route has already used this field
    read_keep_alive(fields)  # the route has already applied this field
    if fields.boolean("_debug_render_only"):
        raise unsupported("_debug_render_only")
    for name in _CUTS:
        if fields.peek(name) is False:
            fields.value(name)
    options = Fields(_whole_numbers(fields.object("options") or {}), "options")
    _check_context(options, facts)
    found = Options(
        sampling=read_sampling(options, facts),
        seed=read_seed(options, seed),
        stream=fields.boolean("stream") is not False,
        max_tokens=_read_limit(options),
        stop=read_stop(options, "stop"),
        logprobs=read_chat_logprobs(fields),
        response_format=_read_format(fields),
    )
    return found, options.unread()


def read_think(fields: Fields, facts: ModelFacts) -> ThinkingOptions:
    """Read `think`, which is true, false or a level. Raises InvalidField, for example if the model cannot think."""
    think = fields.value("think")
    if type(think) is str:
        fields.word("think", LEVELS)
    elif think is not None and type(think) is not bool:
        raise fields.wrong("think", f"true, false, or one of {', '.join(LEVELS)}")
    if think and not facts.thinks:
        raise unsupported("think", f"{facts.name} does not think", hint="leave this field out, or send false")
    name = "reasoning_effort" if type(think) is str else "enable_thinking"
    return read_thinking(Fields({name: think}), facts)


def read_keep_alive(fields: Fields) -> float | None:
    """Return `keep_alive` in seconds, infinity for a negative value, or None if missing. Raises InvalidField.

    The field is the time that the model stays loaded after the answer: a number of seconds, or a duration in Go's
    notation, such as "1h30m".
    """
    value = fields.value("keep_alive")
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None:
        raise fields.wrong("keep_alive", 'a number of seconds, or a duration such as "5m"')
    return seconds


def keep_alive_of(body: Mapping[str, Any]) -> float | None:
    """Return the `keep_alive` of a body in seconds, or None. Raises InvalidField."""
    return read_keep_alive(Fields(body))


def _seconds(value: Any) -> float | None:
    """Return a duration in seconds, or None if the duration is not valid."""
    try:
        if type(value) is str and len(value) <= _LONGEST_DURATION:
            return parse_duration(value)
        return (math.inf if value < 0 else float(value)) if type(value) in (int, float) else None
    except (ValueError, OverflowError):
        return None


def _whole_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, converting numbers such as 8192.0, which Home Assistant sends, to integers."""
    return {name: int(each) if type(each) is float and each.is_integer() else each for name, each in options.items()}


def _check_context(options: Fields, facts: ModelFacts) -> None:
    """Raise InvalidField if `num_ctx` exceeds the server's context. Smaller values are ignored."""
    context = facts.info.context_size
    if options.peek("num_ctx") == context:
        options.value("num_ctx")
        return
    number = options.peek("num_ctx")
    if number is not None and (type(number) is not int or number < 1):
        raise options.wrong("num_ctx", "an integer of at least 1")
    if number is not None and number > context:
        hint = f"leave num_ctx out, or start the server with -c {number}"
        raise unsupported(
            options.path("num_ctx"), f"{number:,} tokens are more than this server's context of {context:,}", hint=hint
        )


def _read_limit(options: Fields) -> int | None:
    """Return the maximum length of the answer."""
    limit = options.integer("num_predict", min(_NO_LIMITS))
    if limit == 0:
        raise options.wrong("num_predict", "an integer of at least 1, or -1 or -2 for no limit")
    return None if limit in _NO_LIMITS else limit


def _read_format(fields: Fields) -> ResponseFormat | None:
    """Return the format of the answer: `json`, a schema, or None for any text."""
    value = fields.value("format")
    if value in (None, ""):
        return None
    if value == _JSON:
        return ResponseFormat(FormatKind.JSON_OBJECT, origin="format")
    if type(value) is not dict:
        raise InvalidField("format", 'expected "json" or a JSON schema', code="invalid_type")
    return json_schema_format(value, "format")


_TO_CHAT: Final = "send the conversation to /api/chat instead"
_NO_TEMPLATE: Final = "this model has no chat template"


def parse_ollama_chat(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of /api/chat. Raises InvalidField.

    A call that only loads the model has no request. `seed` is the default seed.
    """
    fields = Fields(body)
    options, unread_options = read_ollama_options(fields, facts, seed)
    thinking = read_think(fields, facts)
    tools = read_tools(fields, facts)
    messages, unread = read_ollama_messages(fields)
    if not messages:
        return _only_loading(options, (*fields.unread(), *unread_options))
    if not facts.takes_chats:
        raise unsupported("messages", _NO_TEMPLATE, hint="send a prompt to /api/generate instead")
    request = chat_request(messages, tools, thinking, options)
    return parsed_completion([request], options, (*fields.unread(), *unread, *unread_options))


def parse_generate(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of /api/generate. Raises InvalidField.

    A call that only loads the model has no request. `seed` is the default seed.
    """
    fields = Fields(body)
    options, unread = read_ollama_options(fields, facts, seed)
    prompt, thinking = _read_prompt(fields, facts)
    ignored = (*fields.unread(), *unread)
    if prompt is None:
        return _only_loading(options, ignored)
    return parsed_completion([options.request(prompt, thinking)], options, ignored)


def _read_prompt(fields: Fields, facts: ModelFacts) -> tuple[Prompt | None, ThinkingOptions | None]:
    refuse_images(fields)
    if fields.text("template"):
        raise unsupported("template", "the model's own template is used", hint="write the prompt yourself, with raw")
    if fields.items("context"):
        raise unsupported("context", "obsolete", hint=_TO_CHAT)
    text, system, is_raw = fields.text("prompt"), fields.text("system"), bool(fields.boolean("raw"))
    if suffix := fields.text("suffix"):
        require_filling(facts, "suffix")
        if system or is_raw:
            raise unsupported("suffix", f"cannot be combined with {'raw' if is_raw else 'system'}")
        return FillPrompt(text or "", suffix), None
    if not text:
        return None, None
    if system and (is_raw or not facts.takes_chats):
        raise InvalidField("system", "cannot be combined with raw" if is_raw else _NO_TEMPLATE)
    if is_raw or not facts.takes_chats:
        return TextPrompt(text), None
    thinking = read_think(fields, facts)
    messages = [{"role": "system", "content": system}] if system else []
    return ChatPrompt([*messages, {"role": "user", "content": text}], template_kwargs=thinking.variables), thinking


def _only_loading(options: Options, ignored: tuple[str, ...]) -> ParsedCompletion:
    """Return the result for a call that only loads the model."""
    return parsed_completion([], replace(options, stream=False), ignored)


def only_unloads_chat(body: Mapping[str, Any]) -> bool:
    """Return whether a body of /api/chat only unloads the model. Raises InvalidField."""
    return not body.get("messages") and _unloads(Fields(body))


def only_unloads_generate(body: Mapping[str, Any]) -> bool:
    """Return whether a body of /api/generate only unloads the model. Raises InvalidField."""
    return not body.get("prompt") and not body.get("suffix") and _unloads(Fields(body))


def _unloads(fields: Fields) -> bool:
    fields.text("model")
    return read_keep_alive(fields) == 0
