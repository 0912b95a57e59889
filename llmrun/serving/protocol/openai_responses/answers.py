"""Converts the events of the engine into a response of the Responses API, or into stream events.

The items of an answer are written piece by piece as the events of a stream. Error responses have the same form as in
chat completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, Finished, ModelFacts, TextDelta, TokenLogprobs
from llmrun.serving.protocol.errors import ApiError, openai_body
from llmrun.serving.protocol.openai.objects import Delta, PromptProgress, ToolCallPiece
from llmrun.serving.protocol.openai.objects import TokenLogprobs as LoggedToken
from llmrun.serving.protocol.openai.responses import LogprobLimit, chat_logprobs, choice_of, timings, usage
from llmrun.serving.protocol.openai_responses import objects
from llmrun.serving.protocol.openai_responses.requests import ParsedResponse
from llmrun.serving.protocol.parsed import checked
from llmrun.serving.protocol.wire import OPENAI, typed_event


def error_event(error: ApiError) -> objects.ErrorEvent:
    """Return the event for an error.

    OpenAI's client raises an error if an event contains the field `error`. OpenAI's API documents the other fields.
    """
    return {
        "type": "error",
        "sequence_number": 0,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "error": openai_body(error)["error"],
    }


RESPONSES: Final = replace(OPENAI, frame=typed_event, error_chunk=error_event)


# Maps each kind of item to its ID prefix, and to the types of the events for a piece of text and for the whole text
_KINDS: Final[Mapping[str, tuple[str, objects.EventType, objects.EventType]]] = {
    "message": ("msg", "response.output_text.delta", "response.output_text.done"),
    "reasoning": ("rs", "response.reasoning_text.delta", "response.reasoning_text.done"),
    "function_call": ("fc", "response.function_call_arguments.delta", "response.function_call_arguments.done"),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"),
}


class Item:
    """One item of an answer: a text, the thinking before a text, or a tool call.

    The content of a message or reasoning item is a single text part. A truncated call has incomplete arguments. The
    caller adds sequence numbers to the events of an item.

    kind    the type of the item: "message", "reasoning", "function_call" or "custom_tool_call"
    status  the status of the item
    """

    def __init__(self, kind: str, answer: str, index: int, call: objects.NamedCall | None = None) -> None:
        """Create an empty item.

        answer  the answer's ID without the prefix, from which the item's ID is derived
        index   the position of the item in the answer
        call    the ID and the name of a tool call, or None for other items
        """
        prefix, self._delta, self._done = _KINDS[kind]
        self.kind, self.id = kind, f"{prefix}_{answer}_{index}"
        self.status: objects.Status = "in_progress"
        self._index, self._call = index, call
        self._texts: list[str] = []
        self._logprobs: list[LoggedToken] = []

    def begin(self) -> list[objects.ItemEvent]:
        """Return the events that announce the item."""
        added = self._event("response.output_item.added", {"item": self.written()})
        return [added] if self._call else [added, self._inner("response.content_part.added", {"part": self._part()})]

    def add(self, text: str, tokens: Sequence[TokenLogprobs] = ()) -> objects.ItemEvent:
        """Add text, or a piece of a call's arguments or input, and return the event with this text."""
        self._texts.append(text)
        fields: objects.ItemFields = {"delta": text}
        if self.kind == "message":
            fields["logprobs"] = chat_logprobs(tokens)["content"]
            self._logprobs += fields["logprobs"]
        return self._inner(self._delta, fields)

    def end(self, status: objects.Status) -> list[objects.ItemEvent]:
        """End the item, and return its last events."""
        self.status = status
        part = self._part()
        last = self._event("response.output_item.done", {"item": self.written()})
        if self._call:
            is_custom = self.kind == "custom_tool_call"
            whole: objects.ItemFields = {"input": part["text"]} if is_custom else {"arguments": part["text"]}
            return [self._inner(self._done, whole), last]
        fields: objects.ItemFields = {"text": part["text"]}
        if part["type"] == "output_text":
            fields["logprobs"] = part["logprobs"]
        return [self._inner(self._done, fields), self._inner("response.content_part.done", {"part": part}), last]

    def written(self) -> objects.ResponseOutputItem:
        """Return the item so far. The list of parts is empty until the item has text."""
        text, is_empty = "".join(self._texts), self.status == "in_progress" and not self._texts
        if self._call and self.kind == "custom_tool_call":
            return {"id": self.id, "type": "custom_tool_call", **self._call, "input": text}
        if self._call:
            return {"id": self.id, "type": "function_call", "status": self.status, **self._call, "arguments": text}
        if self.kind == "message":
            texts = [] if is_empty else [self._text_part()]
            return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": texts}
        thoughts = [] if is_empty else [self._thinking_part()]
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": thoughts}

    def _part(self) -> objects.OutputText | objects.ThinkingPart:
        return self._text_part() if self.kind == "message" else self._thinking_part()

    def _text_part(self) -> objects.OutputText:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}

    def _thinking_part(self) -> objects.ThinkingPart:
        return {"type": "reasoning_text", "text": "".join(self._texts)}

    def _inner(self, kind: objects.EventType, fields: objects.ItemFields) -> objects.ItemEvent:
        """Return an event about the content of the item."""
        place: objects.ItemFields = {"item_id": self.id} if self._call else {"item_id": self.id, "content_index": 0}
        return self._event(kind, {**place, **fields})

    def _event(self, kind: objects.EventType, fields: objects.ItemFields) -> objects.ItemEvent:
        return {"type": kind, "output_index": self._index, **fields, "sequence_number": 0}


PREFIX: Final = "resp_"
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
        self._choice = choice_of(prompt)
        self._parsed, self._facts, self._id, self._created = parsed, facts, answer_id, created
        self._items: list[Item] = []
        self._text: Item | None = None  # the open text item
        self._call: Item | None = None  # the open call
        self._unsent: list[TokenLogprobs] = []
        self._limit = LogprobLimit()
        self._finished: Finished | None = None
        self._n_events = 0

    def feed(self, choice: int, event: Event) -> list[objects.ResponseEvent]:
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

    def patience_s(self, client: str) -> float:
        """See PatientAnswer. By default, Codex waits 300 s for an event, and comments do not count."""
        return 10.0

    def begin(self, prompt_tokens: int) -> list[objects.ResponseEvent]:
        """See PatientAnswer."""
        return self._numbered(self._begin())

    def keep_alive(self) -> list[objects.ResponseEvent]:
        """See PatientAnswer. The last number is repeated, so that the numbers of later events are always the same."""
        return [self._in_progress(self._n_events - 1)]

    def progress(self, choice: int, told: PromptProgress) -> list[objects.ResponseEvent]:
        """See ProgressAnswer."""
        return [{**self._in_progress(self._n_events - 1), "prompt_progress": told}]

    def finish(self) -> list[objects.ResponseEvent]:
        """Return the last events of a stream, after the answer has finished."""
        events: list[objects.ResponseEvent] = [*self._end()]
        kind: objects.WholeType = "response.completed" if self._status == "completed" else "response.incomplete"
        return self._numbered([*events, {"type": kind, "response": self.whole(), "sequence_number": 0}])

    def failed(self, error: ApiError) -> list[objects.ResponseEvent]:
        """Return the last events of a failed stream, which contain the error and the response so far."""
        events, response = [*self._begin(), error_event(error)], self._written("failed")
        response["error"] = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        return self._numbered([*events, {"type": "response.failed", "response": response, "sequence_number": 0}])

    def whole(self) -> objects.Response:
        """Return the response, after the answer has finished."""
        if self._finished is None:
            raise RuntimeError("the answer has not finished")
        self._end()
        response = self._written(self._status)
        if self._status == "completed":
            response["completed_at"] = self._created + round(self._finished.timings.total_s)
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        counts = usage([self._finished], 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": counts["prompt_tokens"] - cached},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._finished.thinking_tokens},
            "total_tokens": counts["total_tokens"],
        }
        response["timings"] = timings([self._finished])
        return response

    @property
    def _status(self) -> objects.Status:
        if self._finished is None:
            return "in_progress"
        return "incomplete" if self._finished.reason is FinishReason.LENGTH else "completed"

    def _written(self, status: objects.ResponseStatus) -> objects.Response:
        """Return the response so far."""
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._facts.name,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **self._parsed.settings,  # type: ignore[typeddict-item]  # the settings contain no `timings`
            "output": [item.written() for item in self._items],
            "usage": None,
            "seed": self._parsed.seed,
            "system_fingerprint": self._facts.fingerprint,
        }

    def _begin(self) -> list[objects.ResponseEvent]:
        """Return the first events of a stream if no event was sent yet."""
        if self._n_events:
            return []
        created = self._written("in_progress")
        return [{"type": "response.created", "response": created, "sequence_number": 0}, self._in_progress(0)]

    def _in_progress(self, number: int) -> objects.WholeEvent:
        response = self._written("in_progress")
        return {"type": "response.in_progress", "response": response, "sequence_number": number}

    def _numbered(self, events: list[objects.ResponseEvent]) -> list[objects.ResponseEvent]:
        for event in events:
            event["sequence_number"] = self._n_events
            self._n_events += 1
        return events

    def _keep(self, event: TextDelta) -> None:
        """Keep the log-probabilities of text and possible text, but not of thinking and tool calls."""
        is_other = not event.text and bool(event.reasoning or event.tool_calls)
        if event.unopened or is_other:
            self._unsent = []
        if not is_other:
            self._unsent += event.logprobs

    def _sent(self, deltas: Iterable[Delta]) -> list[objects.ItemEvent]:
        """Return the events for the deltas of a ChatChoice."""
        found: list[objects.ItemEvent] = []
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

    def _add(self, kind: str, text: str, tokens: Sequence[TokenLogprobs]) -> list[objects.ItemEvent]:
        """Add text to the open item if this item is of the given kind, and otherwise to a new item."""
        found: list[objects.ItemEvent] = []
        item = self._text
        if item is None or item.kind != kind:
            found += self._close_text()
            item = self._text = self._new(kind)
            found += item.begin()
        return [*found, item.add(text, tokens)]

    def _add_to_call(self, piece: ToolCallPiece) -> list[objects.ItemEvent]:
        """Add a piece of a call. All pieces of a call precede the pieces of the next call."""
        found: list[objects.ItemEvent] = []
        is_custom = "custom" in piece
        called = (piece["custom"] if is_custom else piece["function"])["name"] if "id" in piece else ""
        text = piece["custom"]["input"] if is_custom else piece["function"]["arguments"]
        if "id" in piece:
            found += [*self._close_text(), *self._close_call()]
            name: objects.CalledTool = self._parsed.names.get(called, {"name": called})
            kind = "custom_tool_call" if is_custom else "function_call"
            self._call = self._new(kind, {"call_id": piece["id"], **name})
            found += self._call.begin()
        assert self._call is not None
        if text:
            found.append(self._call.add(text))
        return found

    def _end(self) -> list[objects.ItemEvent]:
        """End all open items. If the answer was truncated, only the last item is incomplete."""
        found: list[objects.ItemEvent] = []
        if self._status == "completed" and all(item.kind == "reasoning" for item in self._items):
            found += [*self._close_text(), *self._new("message").begin()]
        for item in self._items:
            if item.status == "in_progress":
                found += item.end(self._status if item is self._items[-1] else "completed")
        return found

    def _new(self, kind: str, call: objects.NamedCall | None = None) -> Item:
        self._items.append(Item(kind, self._id.removeprefix(PREFIX), len(self._items), call))
        return self._items[-1]

    def _close_text(self) -> list[objects.ItemEvent]:
        item, self._text = self._text, None
        return [] if item is None else item.end("completed")

    def _close_call(self) -> list[objects.ItemEvent]:
        item, self._call = self._call, None
        return [] if item is None else item.end("completed")
