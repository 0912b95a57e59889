"""Converts the events of the engine into the messages and the streams of Anthropic's API."""

from __future__ import annotations

from typing import Any

from llmrun.base.types import FinishReason
from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import ChatPrompt, Event, Finished, PrefillProgress, TextDelta
from llmrun.serving.protocol.anthropic.blocks import ContentBlocks
from llmrun.serving.protocol.anthropic.requests import ParsedMessage
from llmrun.serving.protocol.openai.choices import ChatChoice
from llmrun.serving.protocol.openai.messages import call_ids
from llmrun.serving.protocol.parsed import checked


class MessageAnswer:
    """The answer to a request for a message. Its events contain the same blocks and IDs as `whole`."""

    def __init__(self, parsed: ParsedMessage, facts: ModelFacts, answer_id: str, created: int) -> None:
        """Create an answer without content. The time `created` is not part of Anthropic's form."""
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
        """Add an event, and return the events to stream. Raises the error of Failed, and Unavailable."""
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
        """Return the first event, with as much of the usage as is known."""
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
    """Return `usage`. The tokens of the prompt are those that were computed and those that were cached.

    None count as written to the cache, which is automatic here and has no price.
    """
    return {
        "input_tokens": computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
        "output_tokens_details": {"thinking_tokens": thinking},
    }
