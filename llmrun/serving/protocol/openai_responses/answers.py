"""Converts the events of the engine into a response of the Responses API, or into stream events.

The items of an answer are written piece by piece as the events of a stream. Error responses have the same form as in
chat completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, Finished, ModelFacts, TextDelta, TokenLogprobs
from llmrun.serving.protocol.errors import ApiError, openai_body
from llmrun.serving.protocol.openai.messages import call_ids
from llmrun.serving.protocol.openai.responses import ChatChoice, Delta, LogprobLimit, chat_logprobs, timings, usage
from llmrun.serving.protocol.openai_responses.requests import ParsedResponse
from llmrun.serving.protocol.parsed import checked
from llmrun.serving.protocol.wire import OPENAI, typed_event


def error_event(error: ApiError, number: int = 0) -> dict[str, Any]:
    """Return the event for an error. `number` is the event's number in the stream.

    OpenAI's client raises an error if an event contains the field `error`. OpenAI's API documents the other fields.
    """
    flat = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", "sequence_number": number, **flat, **openai_body(error)}


RESPONSES: Final = replace(OPENAI, frame=typed_event, error_chunk=error_event)


COMPLETED: Final = "completed"
IN_PROGRESS: Final = "in_progress"
INCOMPLETE: Final = "incomplete"

StreamEvent = dict[str, Any]  # an event without `sequence_number`


# The ID prefix of each kind of item, and the name of the item's text in events
_KINDS: Final = {
    "message": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "function_call": ("fc", "function_call_arguments"),
}


class Item:
    """One item of an answer: a text, the thinking before a text, or a tool call.

    The content of a message or reasoning item is a single text part. A truncated call has incomplete arguments.

    kind    the type of the item: "message", "reasoning" or "function_call"
    status  the status of the item: "in_progress", "completed" or "incomplete"
    """

    def __init__(self, kind: str, answer: str, index: int, call: Mapping[str, str] | None = None) -> None:
        """Create an empty item.

        answer  the answer's ID without the prefix, from which the item's ID is derived
        index   the position of the item in the answer
        call    the ID and the name of a tool call, or None for other items
        """
        prefix, self._text_name = _KINDS[kind]
        self.kind, self.id = kind, f"{prefix}_{answer}_{index}"
        self.status = IN_PROGRESS
        self._index, self._call = index, call
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[StreamEvent]:
        """Return the events that announce the item."""
        added = self._event("output_item.added", item=self.written())
        return [added] if self._call else [added, self._inner_event("content_part.added", part=self._part())]

    def add(self, text: str, tokens: Sequence[TokenLogprobs] = ()) -> StreamEvent:
        """Add text, or a piece of the JSON text of arguments, and return the event with this text."""
        self._texts.append(text)
        fields: dict[str, Any] = {"delta": text}
        if self.kind == "message":
            fields["logprobs"] = chat_logprobs(tokens)["content"]
            self._logprobs += fields["logprobs"]
        return self._inner_event(f"{self._text_name}.delta", **fields)

    def end(self, status: str) -> list[StreamEvent]:
        """End the item, and return its last events."""
        self.status = status
        done, part = f"{self._text_name}.done", self._part()
        last = self._event("output_item.done", item=self.written())
        if self._call:
            return [self._inner_event(done, arguments=part["text"]), last]
        known = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [self._inner_event(done, **known), self._inner_event("content_part.done", part=part), last]

    def written(self) -> dict[str, Any]:
        """Return the item so far. The list of parts is empty until the item has text."""
        item = {"id": self.id, "type": self.kind, "status": self.status}
        if self._call:
            return {**item, **self._call, "arguments": "".join(self._texts)}
        content = [] if self.status == IN_PROGRESS and not self._texts else [self._part()]
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {**item, **own, "content": content}

    def _part(self) -> dict[str, Any]:
        own = {"annotations": [], "logprobs": [*self._logprobs]} if self.kind == "message" else {}
        return {"type": self._text_name, "text": "".join(self._texts), **own}

    def _inner_event(self, kind: str, **fields: Any) -> StreamEvent:
        """Return an event about the content of the item."""
        place = {} if self._call else {"content_index": 0}
        return self._event(kind, item_id=self.id, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": f"response.{kind}", "output_index": self._index, **fields}


PREFIX: Final = "resp_"
_FAILED: Final = "failed"
# The error codes inside a response, which differ from the codes of error responses.
_CODES: Final = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class ResponseAnswer:
    """The answer to one call. The stream contains the same items as `whole`.

    Items follow one another, except that text may begin before the last pieces of a call. All IDs are derived from the
    answer's ID, so that a repeated answer consists of the same bytes.
    """

    def __init__(self, parsed: ParsedResponse, facts: ModelFacts, answer_id: str, created: int) -> None:
        """Create an empty answer.

        answer_id  the ID, which consists of "resp_" and random letters
        created    the Unix time in seconds
        """
        prompt = parsed.request.prompt
        assert isinstance(prompt, ChatPrompt)
        self._choice = ChatChoice(call_ids(prompt.messages))
        self._parsed = parsed
        self._answer, self._created = answer_id.removeprefix(PREFIX), created
        self._head = {"id": answer_id, "object": "response", "created_at": created, "model": facts.name}
        self._tail = {"seed": parsed.seed, "system_fingerprint": facts.fingerprint}
        self._items: list[Item] = []
        self._text: Item | None = None  # the open text item
        self._call: Item | None = None  # the open call
        self._unsent: list[TokenLogprobs] = []
        self._limit = LogprobLimit()
        self._finished: Finished | None = None
        self._n_events = 0

    def feed(self, choice: int, event: Event) -> list[StreamEvent]:
        """Add an event, and return the events to stream.

        Raises the errors of `checked`, and InvalidField if the answer has too many log-probabilities.
        """
        event = checked(event)
        found = self._begin()
        if isinstance(event, TextDelta):
            self._keep(event)
            found += self._sent(self._choice.take(event))
        elif isinstance(event, Finished):
            found += self._sent(self._choice.release())
            self._finished = event
        return self._numbered(found)

    def finish(self) -> list[StreamEvent]:
        """Return the last events of a stream, after the answer has finished."""
        ends = self._end()
        return self._numbered([*ends, {"type": f"response.{self._status}", "response": self.whole()}])

    def failed(self, error: ApiError) -> list[StreamEvent]:
        """Return the last events of a failed stream, which contain the error and the response so far."""
        told = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        response = {**self._written(_FAILED), "error": told}
        return self._numbered(
            [*self._begin(), error_event(error), {"type": f"response.{_FAILED}", "response": response}]
        )

    def whole(self) -> dict[str, Any]:
        """Return the response, after the answer has finished."""
        if self._finished is None:
            raise RuntimeError("the answer has not finished")
        self._end()
        counts = usage([self._finished], 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        ended = self._finished.timings.total_s
        return {
            **self._written(self._status),
            "completed_at": self._created + round(ended) if self._status == COMPLETED else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == INCOMPLETE else None,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": cached,
                    "cache_write_tokens": counts["prompt_tokens"] - cached,
                },
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
            "timings": timings([self._finished]),
        }

    @property
    def _status(self) -> str:
        if self._finished is None:
            return IN_PROGRESS
        return INCOMPLETE if self._finished.reason is FinishReason.LENGTH else COMPLETED

    def _written(self, status: str) -> dict[str, Any]:
        """Return the response so far."""
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **self._parsed.settings,
            "output": [item.written() for item in self._items],
            "usage": None,
            **self._tail,
        }

    def _begin(self) -> list[StreamEvent]:
        """Return the first events of a stream if no event was sent yet."""
        if self._n_events:
            return []
        response = self._written(IN_PROGRESS)
        return [{"type": f"response.{kind}", "response": response} for kind in ("created", IN_PROGRESS)]

    def _numbered(self, events: Sequence[StreamEvent]) -> list[StreamEvent]:
        first, self._n_events = self._n_events, self._n_events + len(events)
        return [{**event, "sequence_number": first + number} for number, event in enumerate(events)]

    def _keep(self, event: TextDelta) -> None:
        """Keep the log-probabilities of text and possible text, but not of thinking and tool calls."""
        is_other = not event.text and bool(event.reasoning or event.tool_calls)
        if event.unopened or is_other:
            self._unsent = []
        if not is_other:
            self._unsent += event.logprobs

    def _sent(self, deltas: Iterable[Delta]) -> list[StreamEvent]:
        """Return the events for the deltas of a ChatChoice."""
        found: list[StreamEvent] = []
        for delta in deltas:
            if "reasoning_content" in delta:
                found += self._add("reasoning", delta["reasoning_content"], ())
            elif "content" in delta:
                tokens, self._unsent = self._unsent, []
                self._limit.count(tokens)
                found += self._add("message", delta["content"], tokens)
            else:
                for piece in delta["tool_calls"]:
                    found += self._add_to_call(piece)
        return found

    def _add(self, kind: str, text: str, tokens: Sequence[TokenLogprobs]) -> list[StreamEvent]:
        """Add text to the open item if this item is of the given kind, and otherwise to a new item."""
        found: list[StreamEvent] = []
        item = self._text
        if item is None or item.kind != kind:
            found += self._close_text()
            item = self._text = self._new(kind)
            found += item.begin()
        return [*found, item.add(text, tokens)]

    def _add_to_call(self, piece: Delta) -> list[StreamEvent]:
        """Add a piece of a call. All pieces of a call precede the pieces of the next call."""
        found: list[StreamEvent] = []
        function = piece["function"]
        if "id" in piece:
            found += [*self._close_text(), *self._close_call()]
            self._call = self._new("function_call", {"call_id": piece["id"], "name": function["name"]})
            found += self._call.begin()
        assert self._call is not None
        if function["arguments"]:
            found.append(self._call.add(function["arguments"]))
        return found

    def _end(self) -> list[StreamEvent]:
        """End all open items. If the answer was truncated, only the last item is incomplete."""
        found: list[StreamEvent] = []
        if self._status == COMPLETED and all(item.kind == "reasoning" for item in self._items):
            found += [*self._close_text(), *self._new("message").begin()]
        for item in self._items:
            if item.status == IN_PROGRESS:
                found += item.end(self._status if item is self._items[-1] else COMPLETED)
        return found

    def _new(self, kind: str, call: Mapping[str, str] | None = None) -> Item:
        self._items.append(Item(kind, self._answer, len(self._items), call))
        return self._items[-1]

    def _close_text(self) -> list[StreamEvent]:
        item, self._text = self._text, None
        return [] if item is None else item.end(COMPLETED)

    def _close_call(self) -> list[StreamEvent]:
        item, self._call = self._call, None
        return [] if item is None else item.end(COMPLETED)
