"""Converts the events of the engine into the messages and streams of Anthropic's API.

This module also writes the list of models and the errors of this API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, Finished, ModelFacts, PrefillProgress, TextDelta
from llmrun.serving.protocol.anthropic.requests import ParsedMessage
from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.openai.messages import call_ids
from llmrun.serving.protocol.openai.responses import ChatChoice, created_of
from llmrun.serving.protocol.parsed import checked
from llmrun.serving.protocol.wire import EVENT_STREAM, WireFormat, typed_event

# A signature proves to Anthropic's servers that one of Anthropic's models wrote the thinking. llmrun needs no proof,
# but some clients drop blocks without a signature.
SIGNATURE: Final = "unsigned"

StreamEvent = dict[str, Any]


# The delta type of each kind of block, and the name of the delta's text field
_DELTAS: Final[Mapping[str, tuple[str, str]]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class _Block:
    """A block of content. `head` contains all fields except the text."""

    head: dict[str, Any]
    texts: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.head["type"])

    @property
    def whole(self) -> dict[str, Any]:
        """The block with the text so far."""
        text = "".join(self.texts)
        if self.kind == "tool_use":
            return {**self.head, "input": _parsed(text)}
        return {**self.head, self.kind: text}


class ContentBlocks:
    """Builds the blocks of one message from the deltas of a chat completion, in the order of the model's output.

    Only one block is open at a time, because the model writes tool calls sequentially.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        """Create a message without content. Unless `shows_thinking` is set, thinking blocks have no text."""
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []
        self._calls: list[int] = []  # the block number of each tool call
        self._is_open = False

    def add(self, deltas: Iterable[Mapping[str, Any]]) -> list[StreamEvent]:
        """Add deltas, and return the events to stream."""
        return [event for delta in deltas for event in self._add(delta)]

    def close(self) -> list[StreamEvent]:
        """End the open block, and return the block's last events."""
        if not self._is_open:
            return []
        self._is_open = False
        last, signed = len(self._blocks) - 1, []
        if self._blocks[last].kind == "thinking":
            self._blocks[last].head["signature"] = SIGNATURE
            signed = [_delta(last, {"type": "signature_delta", "signature": SIGNATURE})]
        return [*signed, _event("content_block_stop", last)]

    def whole(self) -> list[dict[str, Any]]:
        """Return the complete content."""
        return [block.whole for block in self._blocks]

    def _add(self, delta: Mapping[str, Any]) -> list[StreamEvent]:
        if thought := delta.get("reasoning_content"):
            return self._text("thinking", thought if self._shows_thinking else "")
        if text := delta.get("content"):
            return self._text("text", text)
        events: list[StreamEvent] = []
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._begin({"type": "tool_use", "id": call["id"], "name": call["function"]["name"]})
                self._calls.append(len(self._blocks) - 1)
            events += self._piece(self._calls[call["index"]], call["function"]["arguments"])
        return events

    def _text(self, kind: str, text: str) -> list[StreamEvent]:
        """Add text to the open block if this block is of the given kind, and otherwise to a new block."""
        continues = self._is_open and self._blocks[-1].kind == kind
        unsigned = {"signature": ""} if kind == "thinking" else {}
        events = [] if continues else self._begin({"type": kind, **unsigned})
        return [*events, *self._piece(len(self._blocks) - 1, text)]

    def _begin(self, head: dict[str, Any]) -> list[StreamEvent]:
        events = self.close()
        block = _Block(head)
        self._blocks.append(block)
        self._is_open = True
        return [*events, _event("content_block_start", len(self._blocks) - 1, content_block=block.whole)]

    def _piece(self, number: int, text: str) -> list[StreamEvent]:
        if not text:
            return []
        block = self._blocks[number]
        block.texts.append(text)
        kind, field_name = _DELTAS[block.kind]
        return [_delta(number, {"type": kind, field_name: text})]


def _event(kind: str, number: int, **fields: Any) -> StreamEvent:
    return {"type": kind, "index": number, **fields}


def _delta(number: int, delta: Mapping[str, Any]) -> StreamEvent:
    return _event("content_block_delta", number, delta=delta)


def _parsed(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, which is empty for incomplete or invalid arguments.

    Incomplete arguments, such as the first half of a shell command, could do harm.
    """
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


VERSION_HEADER: Final = "anthropic-version"  # only Anthropic's clients send this header, with every request


def anthropic_models(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of OpenAI's /v1/models to Anthropic's form, with all models on one page."""
    models = [anthropic_model(each) for each in body["data"]]
    ids = [model["id"] for model in models]
    return {"data": models, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


def anthropic_model(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of OpenAI's /v1/models/{id} to Anthropic's form."""
    context = body.get("max_model_len")  # the server knows the context only for loaded models
    return {
        "type": "model",
        "id": body["id"],
        "display_name": body["id"],
        "created_at": datetime.fromtimestamp(created_of(body), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


class MessageAnswer:
    """The answer to a request for a message. The stream contains the same blocks and IDs as `whole`."""

    def __init__(self, parsed: ParsedMessage, facts: ModelFacts, answer_id: str, created: int) -> None:
        """Create an empty answer. Anthropic's format does not contain the time `created`."""
        prompt = parsed.request.prompt
        assert isinstance(prompt, ChatPrompt)
        self._parsed = parsed
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": facts.name}
        self._extras = {"seed": parsed.seed, "system_fingerprint": facts.fingerprint}
        self._choice = ChatChoice(call_ids(prompt.messages))
        self._blocks = ContentBlocks(shows_thinking=parsed.shows_thinking)
        self._finished: Finished | None = None
        self._has_begun = False

    def feed(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """Add an event, and return the events to stream. Raises the error in a Failed event, and Unavailable."""
        chunks = [] if self._has_begun else [self._start(event)]
        self._has_begun = True
        event = checked(event)
        if isinstance(event, TextDelta):
            return chunks + self._blocks.add(self._choice.take(event))
        if isinstance(event, Finished):
            self._finished = event
            chunks += self._blocks.add(self._choice.release())
            return [*chunks, *self._blocks.close(), self._delta(event)]
        return chunks

    def finish(self) -> list[dict[str, Any]]:
        """Return the last event of a stream."""
        return [{"type": "message_stop"}]

    def whole(self) -> dict[str, Any]:
        """Return the message."""
        ended = self._finished
        if ended is None:
            raise RuntimeError("the answer has not finished")
        content, usage = self._blocks.whole(), _usage(ended)
        return {**self._head, "content": content, **self._ending(ended), "usage": usage, **self._extras}

    def _start(self, event: Event) -> dict[str, Any]:
        """Return the first event, with the known part of the usage."""
        tokens = event.total if isinstance(event, PrefillProgress) else 0
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": _counts(tokens, 0, 0, 0), **self._extras}
        return {"type": "message_start", "message": message}

    def _delta(self, event: Finished) -> dict[str, Any]:
        return {"type": "message_delta", "delta": self._ending(event), "usage": _usage(event)}

    def _ending(self, event: Finished) -> dict[str, Any]:
        return {"stop_reason": _stop_reason(event, self._parsed.request.max_tokens), "stop_sequence": event.stop}


def _stop_reason(event: Finished, max_tokens: int | None) -> str:
    if event.reason is FinishReason.TOOL_CALLS:
        return "tool_use"
    if event.reason is FinishReason.STOP:
        return "end_turn" if event.stop is None else "stop_sequence"
    limited = max_tokens is not None and event.timings.generated_tokens >= max_tokens
    return "max_tokens" if limited else "model_context_window_exceeded"


def _usage(event: Finished) -> dict[str, Any]:
    times = event.timings
    return _counts(
        times.prompt_tokens - times.cached_tokens, times.cached_tokens, times.generated_tokens, event.thinking_tokens
    )


def _counts(computed: int, cached: int, generated: int, thinking: int) -> dict[str, Any]:
    """Return `usage`. The prompt's tokens are divided into computed tokens and cached tokens.

    No tokens count as written to the cache, because llmrun caches prefixes automatically and at no cost.
    """
    return {
        "input_tokens": computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


_INVALID: Final = "invalid_request_error"  # the type of all client errors not listed below
# Anthropic's status for overload is 529. llmrun sends 503, which proxies know, and Anthropic's clients retry both.
_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The tool runner of Anthropic's client asks the server to keep the conversation. After an error with this code, the
# runner sends the whole conversation itself.
_NO_THREADS: Final = {"error_code": "thread_unsupported_request"}
_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
# Matches the end of ContextExceeded.by_prompt's message
_TOO_LONG: Final = re.compile(r"([\d,]+) tokens plus one for the answer exceed the limit of ([\d,]+)(.*)")


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response, which is also the last event of a failed stream."""
    kind = _KINDS.get(error.status, _INVALID if error.status < 500 else "api_error")
    details = {"details": _NO_THREADS} if error.param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": _message(error), **details}}


def _message(error: ApiError) -> str:
    """Return the message of an error, in Anthropic's form if the prompt is too long.

    Claude Code recognizes Anthropic's form, reads both token counts, and then shortens the conversation.
    """
    found = _TOO_LONG.search(error.message) if error.code == "context_length_exceeded" else None
    if found is None:
        return error.message
    tokens, limit = (number.replace(",", "") for number in found.groups()[:2])
    return f"prompt is too long: {tokens} tokens > {limit} maximum{found[3]}"


ANTHROPIC: Final = WireFormat(EVENT_STREAM, typed_event, _PING, b"", anthropic_body, anthropic_body)
