"""Writes the answers of Ollama's /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from llmrun.base.errors import InvalidAnswer
from llmrun.base.types import FinishReason
from llmrun.engine.constraint.strict_json import parse
from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import Event, Finished
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from llmrun.serving.protocol.openai.responses import ChatAnswer
from llmrun.serving.protocol.parsed import Answer
from llmrun.serving.protocol.wire import json_bytes

_LENGTH: Final = "length"
_STOP: Final = "stop"
LOADED, UNLOADED = "load", "unload"

# Returns the fields of a chunk or a body with a part of the message
Write = Callable[[Mapping[str, Any]], dict[str, Any]]


def chat_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of /api/chat for a part of the message."""
    return {"message": {"role": "assistant", **message}}


def generate_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of /api/generate for a part of the message, which has no tool calls."""
    return {"response": message["content"], **{name: message[name] for name in ("thinking",) if name in message}}


def empty_answer(write: Write, name: str, created: float, reason: str) -> dict[str, Any]:
    """Return the body for a call that only loads or unloads a model. `created` is a Unix time in seconds."""
    head = {"model": name, "created_at": timestamp(created)}
    return {**head, **write({"content": ""}), "done": True, "done_reason": reason}


def timestamp(seconds: float) -> str:
    """Return a Unix time in the notation of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaAnswer:
    """The answer to one call: that of a chat completion, in another form."""

    def __init__(self, write: Write, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        self._write = write
        self._chat = ChatAnswer(parsed, facts, answer_id, created)
        self._head = {"model": facts.name, "created_at": timestamp(created)}
        self._unsent: list[Mapping[str, Any]] = []  # log-probabilities of tokens whose text has not been sent
        self._end: Finished | None = None

    def feed(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """See Answer. Also raises InvalidAnswer for tool calls whose arguments are not a JSON object."""
        chunks = [each for chunk in self._chat.feed(choice, event) for each in self._pieces(chunk["choices"][0])]
        if not isinstance(event, Finished):
            return chunks
        self._end = event
        body = self._chat.whole()
        if calls := _calls(body["choices"][0]["message"], event.reason):
            chunks.append(self._chunk({"tool_calls": calls}))
        return [*chunks, {**self._chunk({}, done=True), **_counts(body, event)}]

    def finish(self) -> list[dict[str, Any]]:
        """See Answer."""
        return []

    def whole(self) -> dict[str, Any]:
        """See Answer."""
        assert self._end is not None
        body = self._chat.whole()
        choice = body["choices"][0]
        message, logprobs = choice["message"], choice["logprobs"]
        fields = {
            "content": message["content"] or "",
            "thinking": message.get("reasoning_content"),
            "tool_calls": _calls(message, self._end.reason),
        }
        self._unsent = logprobs["content"] if logprobs else []
        return {**self._chunk(fields, done=True), **_counts(body, self._end)}

    def _pieces(self, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks for a piece of a chat completion. Tool calls are sent when they are complete."""
        if choice["logprobs"]:
            self._unsent += choice["logprobs"]["content"]
        delta = choice["delta"]
        if text := delta.get("reasoning_content"):
            return [self._chunk({"thinking": text})]
        return [self._chunk({"content": text})] if (text := delta.get("content")) else []

    def _chunk(self, fields: Mapping[str, Any], *, done: bool = False) -> dict[str, Any]:
        logprobs, self._unsent = self._unsent, []
        message = {name: value for name, value in {"content": "", **fields}.items() if value or name == "content"}
        tokens = {"logprobs": logprobs} if logprobs else {}
        return {**self._head, **self._write(message), **tokens, "done": done}


class _Loaded:
    """The answer to a call without a request, which only loads the model."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def feed(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """See Answer."""
        raise RuntimeError("a call without requests has no events")

    def finish(self) -> list[dict[str, Any]]:
        """See Answer."""
        return [dict(self._body)]

    def whole(self) -> Mapping[str, Any]:
        """See Answer."""
        return self._body


def ollama_answer(write: Write, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> Answer:
    """Return the answer to a call. `write` returns the fields of its route."""
    if parsed.requests:
        return OllamaAnswer(write, parsed, facts, answer_id, created)
    return _Loaded(empty_answer(write, facts.name, created, LOADED))


def _counts(body: Mapping[str, Any], end: Finished) -> dict[str, Any]:
    """Return the last fields of an answer, from the body of the chat completion. Durations are in nanoseconds.

    `load_duration` is 0, because the times of an answer begin when its model is loaded. The last three fields are
    llmrun's own.
    """
    times = end.timings
    return {
        "done_reason": _LENGTH if end.reason is FinishReason.LENGTH else _STOP,
        "total_duration": _nanoseconds(times.total_s),
        "load_duration": 0,
        "prompt_eval_count": times.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(times.prefill_s),
        "eval_count": times.generated_tokens,
        "eval_duration": _nanoseconds(times.decode_s),
        **{name: body[name] for name in ("seed", "system_fingerprint", "timings")},
    }


def _calls(message: Mapping[str, Any], reason: FinishReason) -> Sequence[dict[str, Any]]:
    """Return the tool calls of a message, with arguments as objects.

    A call that was cut off is left out, which `done_reason` tells the client. Raises InvalidAnswer for another call
    whose arguments are not an object.
    """
    found: list[dict[str, Any]] = []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], _parsed(call["function"]["arguments"])
        if type(arguments) is dict:
            function = {"index": len(found), "name": name, "arguments": arguments}
            found.append({"id": call["id"], "function": function})
        elif reason is not FinishReason.LENGTH:
            raise InvalidAnswer(f"the arguments of the model's call of {name} are not a JSON object")
    return found


def _parsed(text: str) -> Any:
    """Return the value of JSON text, or None if it is not valid or has numbers such as 1e999, which become infinity."""
    try:
        value = parse(text)
        json_bytes(value)
    except (ValueError, RecursionError):
        return None
    return value


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
