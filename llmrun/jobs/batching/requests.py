"""Turns the lines of a batch into calls of OpenAI's API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llmrun.base.errors import LlmrunError
from llmrun.formats.gguf.problems import shown
from llmrun.jobs.batching.lines import Line
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION
from llmrun.serving.protocol.fields import Fields, missing
from llmrun.serving.protocol.json_body import parse_json

_LONGEST_ID: Final = 512  # characters
_SEEDS: Final = 1 << 31  # the largest seed that all servers and JSON parsers accept is 2**31 - 1
_LEFT_OUT: Final = ("model", "stream", "stream_options")
_RANDOM_SEED: Final = -1  # as in llama.cpp

Fill = Callable[[Mapping[str, Any]], tuple[str, str | None]]


@dataclass(frozen=True, slots=True)
class Default:
    """A field that a call gets if it has none of these names, of which the first one is used."""

    names: tuple[str, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options that a run adds to its calls.

    seed      decides the seeds of calls that have none
    defaults  fields for calls that do not have them
    system    the system prompt for lines with a prompt, or None
    fill      turns the fields of a line into a prompt and a system prompt, or None if lines are calls or prompts
    template  the text of the prompt template that `fill` uses, or None
    """

    seed: int = 0
    defaults: tuple[Default, ...] = ()
    system: str | None = None
    fill: Fill | None = None
    template: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return everything but the seed as JSON, to recognize a run with other options."""
        defaults = {default.names[0]: default.value for default in self.defaults}
        return {**defaults, "--system": self.system, "--template": self.template}


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a batch, reduced to the fields that affect its answer.

    key    identifies the call: calls with equal keys have equal answers
    model  the model that the line named, or ""; the run's own model answers
    """

    url: str
    body: Mapping[str, Any]
    key: bytes = field(default=b"")
    model: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A line that is a request: the line's own ID, and its call."""

    custom_id: str
    call: Call


class BadLine(LlmrunError):
    """A line is not a request.

    code       a word for the kind of problem, as in OpenAI's API
    custom_id  the line's ID if it can be read, or None
    """

    def __init__(self, message: str, code: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def read_request(line: Line, options: CallOptions) -> Asked:
    """Read a line. Raises BadLine.

    A line is an object with `custom_id`, `method`, `url` and `body`, as in OpenAI's Batch API, or an object with either
    `messages` or `prompt`, which may have a `custom_id` and any field of a chat completion. With `options.fill`, a line
    has the values for a prompt template.
    """
    if line.problem:
        raise BadLine(line.problem, "invalid_line")
    custom_id: str | None = None
    try:
        fields = Fields(parse_json(line.data))
        custom_id = _read_id(fields, line.number)
        if options.fill is not None:
            values = {"custom_id": custom_id, **fields.rest()}
            return _asked(custom_id, CHAT, {"messages": _messages(*options.fill(values))}, options)
        if fields.peek("body") is not None:
            return _openai_line(fields, custom_id, options)
        return _plain_line(fields, custom_id, options)
    except LlmrunError as error:
        words = str(error).replace("the request body", "the line")
        raise BadLine(f"{words}; {error.hint}" if error.hint else words, "invalid_request", custom_id) from None


def _read_id(fields: Fields, number: int) -> str:
    custom_id = fields.text("custom_id")
    if custom_id is None:
        if fields.peek("body") is not None:
            raise missing("custom_id")
        return f"line-{number}"
    if not 1 <= len(custom_id) <= _LONGEST_ID:
        raise fields.wrong("custom_id", f"1 to {_LONGEST_ID} characters")
    return custom_id


def _openai_line(fields: Fields, custom_id: str, options: CallOptions) -> Asked:
    fields.word("method", ("POST",))
    url = fields.word("url", (CHAT, COMPLETION))
    if url is None:
        raise missing("url")
    body = fields.object("body")
    assert body is not None
    if unknown := fields.unread():
        raise LlmrunError(f"{unknown[0]}: unknown field next to body", hint="put it into the body")
    return _asked(custom_id, url, body, options)


def _plain_line(fields: Fields, custom_id: str, options: CallOptions) -> Asked:
    prompt = fields.text("prompt")
    if (prompt is None) == (fields.peek("messages") is None):
        raise LlmrunError("the line must have exactly one of prompt and messages")
    body = dict(fields.rest())
    if prompt is not None:
        body["messages"] = _messages(prompt, options.system)
    return _asked(custom_id, CHAT, body, options)


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _asked(custom_id: str, url: str, given: Mapping[str, Any], options: CallOptions) -> Asked:
    body = {name: value for name, value in given.items() if value is not None and name not in _LEFT_OUT}
    if given.get("stream"):
        raise LlmrunError("stream: not supported in a batch")
    for default in options.defaults:
        if not any(name in body for name in default.names):
            body[default.names[0]] = default.value
    if body.get("seed") == _RANDOM_SEED:
        del body["seed"]
    content = json.dumps([url, body, options.seed], sort_keys=True, separators=(",", ":")).encode()
    key = hashlib.sha256(content).digest()
    body.setdefault("seed", int.from_bytes(key[:8], "big") % _SEEDS)
    model = given.get("model")
    return Asked(custom_id, Call(url, body, key[:16], shown(model) if isinstance(model, str) else ""))
