"""Converts the events of the engine into the messages and streams of Anthropic's API.

This module also writes the list of models and the errors of this API.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, Finished, ModelFacts, PrefillProgress, TextDelta
from llmrun.serving.protocol.anthropic import objects
from llmrun.serving.protocol.anthropic.requests import ParsedMessage
from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.openai.objects import Delta, PromptProgress
from llmrun.serving.protocol.openai.responses import choice_of, created_of
from llmrun.serving.protocol.parsed import checked
from llmrun.serving.protocol.wire import EVENT_STREAM, WireFormat, parsed_object, typed_event

# A signature proves to Anthropic's servers that one of Anthropic's models wrote the thinking. llmrun needs no proof,
# but some clients drop blocks without a signature.
SIGNATURE: Final = "unsigned"


@dataclass(slots=True)
class _Block:
    """A block of content. `head` is the block without its text."""

    head: objects.ContentBlock
    texts: list[str] = field(default_factory=list)

    def whole(self) -> objects.ContentBlock:
        """Return the block with all text added so far."""
        text = "".join(self.texts)
        if self.head["type"] == "tool_use":
            # Incomplete arguments, such as the first half of a shell command, could do harm.
            return {**self.head, "input": parsed_object(text) or {}}
        if self.head["type"] == "thinking":
            return {**self.head, "thinking": text}
        return {**self.head, "text": text}

    def add(self, text: str) -> objects.BlockDelta:
        """Add text to the block, and return the delta for the stream."""
        self.texts.append(text)
        if self.head["type"] == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        if self.head["type"] == "thinking":
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "text_delta", "text": text}


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

    def add(self, deltas: Iterable[Delta]) -> list[objects.MessageEvent]:
        """Add deltas, and return the events to stream."""
        return [event for delta in deltas for event in self._add(delta)]

    def close(self) -> list[objects.MessageEvent]:
        """End the open block, and return the block's last events."""
        if not self._is_open:
            return []
        self._is_open = False
        last, events = len(self._blocks) - 1, list[objects.MessageEvent]()
        head = self._blocks[last].head
        if head["type"] == "thinking":
            head["signature"] = SIGNATURE
            signed: objects.BlockDelta = {"type": "signature_delta", "signature": SIGNATURE}
            events.append({"type": "content_block_delta", "index": last, "delta": signed})
        return [*events, {"type": "content_block_stop", "index": last}]

    def whole(self) -> list[objects.ContentBlock]:
        """Return the complete content."""
        return [block.whole() for block in self._blocks]

    def _add(self, delta: Delta) -> list[objects.MessageEvent]:
        if thought := delta.get("reasoning_content"):
            events = self._continue({"type": "thinking", "thinking": "", "signature": ""})
            return events + self._piece(len(self._blocks) - 1, thought if self._shows_thinking else "")
        if text := delta.get("content"):
            events = self._continue({"type": "text", "text": ""})
            return events + self._piece(len(self._blocks) - 1, text)
        events = []
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                events += self._begin({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
                self._calls.append(len(self._blocks) - 1)
            events += self._piece(self._calls[call["index"]], call["function"]["arguments"])
        return events

    def _continue(self, head: objects.ContentBlock) -> list[objects.MessageEvent]:
        """Begin a block, unless a block of the same type is open."""
        continues = self._is_open and self._blocks[-1].head["type"] == head["type"]
        return [] if continues else self._begin(head)

    def _begin(self, head: objects.ContentBlock) -> list[objects.MessageEvent]:
        events = self.close()
        self._blocks.append(_Block(head))
        self._is_open, index = True, len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": self._blocks[-1].whole()}]

    def _piece(self, number: int, text: str) -> list[objects.MessageEvent]:
        if not text:
            return []
        return [{"type": "content_block_delta", "index": number, "delta": self._blocks[number].add(text)}]


VERSION_HEADER: Final = "anthropic-version"  # only Anthropic's clients send this header, with every request


def anthropic_models(body: Mapping[str, Any]) -> objects.AnthropicModels:
    """Convert the body of OpenAI's /v1/models to Anthropic's form, with all models on one page."""
    models = [anthropic_model(each) for each in body["data"]]
    ids = [model["id"] for model in models]
    return {"data": models, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


def anthropic_model(body: Mapping[str, Any]) -> objects.AnthropicModel:
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


_CLAUDE_CODE: Final = "claude-cli/"  # begins its User-Agent


class MessageAnswer:
    """The answer to a request for a message. The stream contains the same blocks and IDs as `whole`."""

    def __init__(self, parsed: ParsedMessage, facts: ModelFacts, answer_id: str, created: int) -> None:
        """Create an empty answer. Anthropic's format does not contain the time `created`."""
        prompt = parsed.request.prompt
        assert isinstance(prompt, ChatPrompt)
        self._parsed, self._facts, self._id = parsed, facts, answer_id
        self._choice = choice_of(prompt)
        self._blocks = ContentBlocks(shows_thinking=parsed.shows_thinking)
        self._finished: Finished | None = None
        self._prompt_usage: objects.MessageUsage | None = None

    def feed(self, choice: int, event: Event) -> list[objects.MessageEvent]:
        """Add an event, and return the events to stream. Raises the error in a Failed event, and Unavailable."""
        computed, cached = (event.total - event.cached, event.cached) if isinstance(event, PrefillProgress) else (0, 0)
        chunks = self._begin(_counts(computed, cached, 0, 0))
        event = checked(event)
        if isinstance(event, TextDelta):
            return chunks + self._blocks.add(self._choice.take(event))
        if isinstance(event, Finished):
            self._finished = event
            chunks += [*self._blocks.add(self._choice.release()), *self._blocks.close()]
            chunks.append({"type": "message_delta", "delta": self._ending(event), "usage": _usage(event)})
        return chunks

    def patience_s(self, client: str) -> float:
        """See PatientAnswer. Claude Code waits 300 s for an event. Pings extend this time once, or never.

        Other clients need only pings, and LiteLLM treats every `message_delta` as the end of the answer.
        """
        return 100.0 if client.startswith(_CLAUDE_CODE) else math.inf

    def begin(self, prompt_tokens: int) -> list[objects.MessageEvent]:
        """See PatientAnswer."""
        return self._begin(_counts(prompt_tokens, 0, 0, 0))

    def keep_alive(self) -> list[objects.MessageEvent]:
        """See PatientAnswer."""
        nothing: objects.MessageEnding = {"stop_reason": None, "stop_sequence": None}
        assert self._prompt_usage is not None, "the stream has not begun"
        return [{"type": "message_delta", "delta": nothing, "usage": self._prompt_usage}]

    def progress(self, choice: int, told: PromptProgress) -> list[objects.MessageEvent]:
        """See ProgressAnswer."""
        return [{"type": "ping", "prompt_progress": told}]

    def finish(self) -> list[objects.MessageEvent]:
        """Return the last event of a stream."""
        return [{"type": "message_stop"}]

    def whole(self) -> objects.AnthropicMessage:
        """Return the message."""
        if self._finished is None:
            raise RuntimeError("the answer has not finished")
        return self._message(self._ending(self._finished), _usage(self._finished))

    def _begin(self, usage: objects.MessageUsage) -> list[objects.MessageEvent]:
        """Return the first event, with the known part of the usage, if the stream has not begun."""
        if self._prompt_usage is not None:
            return []
        self._prompt_usage = usage
        message = self._message({"stop_reason": None, "stop_sequence": None}, usage)
        return [{"type": "message_start", "message": message}]

    def _message(self, ending: objects.MessageEnding, usage: objects.MessageUsage) -> objects.AnthropicMessage:
        """Return the message with all content added so far."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._facts.name,
            "content": self._blocks.whole(),
            **ending,
            "usage": usage,
            "seed": self._parsed.seed,
            "system_fingerprint": self._facts.fingerprint,
        }

    def _ending(self, event: Finished) -> objects.MessageEnding:
        return {"stop_reason": _stop_reason(event, self._parsed.request.max_tokens), "stop_sequence": event.stop}


def _stop_reason(event: Finished, max_tokens: int | None) -> objects.StopReason:
    if event.reason is FinishReason.TOOL_CALLS:
        return "tool_use"
    if event.reason is FinishReason.STOP:
        return "end_turn" if event.stop is None else "stop_sequence"
    limited = max_tokens is not None and event.timings.generated_tokens >= max_tokens
    return "max_tokens" if limited else "model_context_window_exceeded"


def _usage(event: Finished) -> objects.MessageUsage:
    times = event.timings
    return _counts(
        times.prompt_tokens - times.cached_tokens, times.cached_tokens, times.generated_tokens, event.thinking_tokens
    )


def _counts(computed: int, cached: int, generated: int, thinking: int) -> objects.MessageUsage:
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
_PING: Final[objects.MessageEvent] = {"type": "ping"}
# Matches the end of ContextExceeded.by_prompt's message
_TOO_LONG: Final = re.compile(r"([\d,]+) tokens plus one for the answer exceed the limit of ([\d,]+)(.*)")


def anthropic_body(error: ApiError) -> objects.AnthropicError:
    """Return the body of an error response, which is also the last event of a failed stream."""
    kind = _KINDS.get(error.status, _INVALID if error.status < 500 else "api_error")
    body: objects.AnthropicError = {"type": "error", "error": {"type": kind, "message": _message(error)}}
    if error.param == "thread":
        # The tool runner of Anthropic's client asks the server to keep the conversation. After an error with this
        # code, the runner sends the whole conversation itself.
        body["error"]["details"] = {"error_code": "thread_unsupported_request"}
    return body


def _message(error: ApiError) -> str:
    """Return the message of an error, in Anthropic's form if the prompt is too long.

    Claude Code recognizes Anthropic's form, reads both token counts, and then shortens the conversation.
    """
    found = _TOO_LONG.search(error.message) if error.code == "context_length_exceeded" else None
    if found is None:
        return error.message
    tokens, limit = (number.replace(",", "") for number in found.groups()[:2])
    return f"prompt is too long: {tokens} tokens > {limit} maximum{found[3]}"


ANTHROPIC: Final = WireFormat(
    EVENT_STREAM, typed_event, lambda words: typed_event(_PING, ""), b"", anthropic_body, anthropic_body
)
