"""Splits the streams of upstreams into events and finds out how far an answer has come, for all APIs.

Upstreams are not trusted: the length of an event is limited, and events that are not JSON are errors. The bytes of
events are passed on unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Final

from llmrun.engine.remote.event_ids import is_event_id
from llmrun.engine.remote.stream import server_words

MOST_BYTES: Final = 4 << 20  # the limit of one event; the last one of a response contains the whole answer
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_NEWLINE: Final = re.compile(rb"\n")
_DONE: Final = b"[DONE]"
_PING: Final = "ping"
# Events of the Responses API and of Anthropic's that come before anything is generated.
_EARLY_TYPES: Final = (
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "message_start",
    "content_block_start",
)
_LAST_TYPES: Final = ("response.completed", "response.incomplete", "message_stop")
_ERROR_TYPES: Final = ("error", "response.failed")
_TEXTS: Final = ("content", "text", "reasoning_content", "reasoning", "refusal", "tool_calls", "thinking", "response")


class BadStream(ValueError):
    """An upstream sent something that is not an event of an answer."""


class Progress(IntEnum):
    """How far an event takes an answer.

    EARLY   nothing has been generated yet, so another upstream can still take over
    TOKEN   something has been generated
    FINISH  the answer is complete, but other events may follow
    LAST    the last event
    ERROR   an error, which ends the stream
    """

    EARLY = auto()
    TOKEN = auto()
    FINISH = auto()
    LAST = auto()
    ERROR = auto()


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event.

    raw       its bytes, including the blank line or newline at the end
    id        the value for `Last-Event-ID`; "" if it has none, or none of llmrun
    progress  how far the answer has come
    data      its JSON object; empty for `[DONE]`
    """

    raw: bytes
    id: str
    progress: Progress
    data: Mapping[str, Any]


class EventSplitter:
    """Splits a stream of server-sent events, or of JSON lines as in Ollama's API.

    Comments and Anthropic's pings are dropped, because this server sends its own.
    """

    def __init__(self, *, json_lines: bool) -> None:
        self._json_lines = json_lines
        self._end = _NEWLINE if json_lines else _BLANK_LINE
        self._held = bytearray()

    def feed(self, data: bytes) -> list[StreamEvent]:
        """Return the events that are complete now. Raises BadStream."""
        searched = max(0, len(self._held) - 2)  # the last two bytes may be the beginning of the end
        self._held += data
        events, start = [], 0
        while found := self._end.search(self._held, max(start, searched)):
            raw = bytes(self._held[start : found.end()])
            start = found.end()
            if (event := self._event(raw)) is not None:
                events.append(event)
        del self._held[:start]
        if len(self._held) > MOST_BYTES:
            raise BadStream(f"an event of more than {MOST_BYTES:,} bytes")
        return events

    def _event(self, raw: bytes) -> StreamEvent | None:
        if self._json_lines:
            return None if raw.isspace() else _parsed(raw, "", raw)
        lines = [line.partition(b":") for line in raw.splitlines()]
        data = b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name in (b"data", b"error"))
        ids = [value.strip().decode("latin-1") for name, _, value in lines if name == b"id"]
        known = bool(ids) and is_event_id(ids[-1])
        event = _parsed(raw, ids[-1] if known else "", data) if data else None
        return None if event is not None and event.data.get("type") == _PING else event


def _parsed(raw: bytes, event_id: str, data: bytes) -> StreamEvent:
    if data.strip() == _DONE:
        return StreamEvent(raw, event_id, Progress.LAST, {})
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # invalid, too deeply nested, or a number that is too long
        raise BadStream("an event that is not valid JSON") from None
    if not isinstance(value, dict):
        raise BadStream("an event that is not a JSON object")
    return StreamEvent(raw, event_id, _progress(value), value)


def _progress(data: Mapping[str, Any]) -> Progress:
    kind = data.get("type")
    if kind in _ERROR_TYPES or server_words(data):
        return Progress.ERROR
    if kind in _LAST_TYPES or data.get("done") is True:
        return Progress.LAST
    if data.get("stop") is True:  # in llama-server's own API
        return Progress.FINISH
    if isinstance(choices := data.get("choices"), list):
        parts = [choice for choice in choices if isinstance(choice, dict)]
        if any(part.get("finish_reason") for part in parts):
            return Progress.FINISH
        return Progress.TOKEN if any(map(_has_text, parts)) else Progress.EARLY
    if kind in _EARLY_TYPES:
        return Progress.EARLY
    known = "done" in data or "stop" in data  # Ollama and llama-server send empty texts, too
    return Progress.EARLY if known and not _has_text(data) else Progress.TOKEN


def _has_text(part: Mapping[str, Any]) -> bool:
    """Return whether a choice, or the message in it, contains something that was generated."""
    inner = part.get("delta") or part.get("message")
    return any(part.get(name) for name in _TEXTS) or (isinstance(inner, dict) and _has_text(inner))
