"""Streams answers as server-sent events.

Backpressure needs no code here: `send` waits while the connection's buffer is full, and meanwhile the events of the
answer collect in memory, so that decoding never waits for a client. A client that takes nothing for a minute is cut off
by `connections.py`, which ends its requests like any other disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from starlette.types import Send

from llmrun.engine.requests import Event
from llmrun.errors import LlmrunError
from llmrun.protocol.errors import openai_body
from llmrun.serving.choices import Choices
from llmrun.serving.refusals import as_api_error, json_bytes

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would collect events before it passes them on
}
_PING = b": ping\n\n"  # a comment, which clients skip
_DONE = b"data: [DONE]\n\n"


class StreamedAnswer(Protocol):
    """An answer of an API whose chunks can be streamed, such as ChatAnswer."""

    def feed(self, choice: int, event: Event) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]: ...


async def stream(
    send: Send, choices: Choices, answer: StreamedAnswer, headers: Mapping[str, str], ping_s: float
) -> bool:
    """Send an answer whose requests have been accepted. Returns False if it failed.

    The error is then the last event of the stream. Bugs are raised as well.

    ping_s  the longest silence in seconds
    """
    fields = [(name.encode("ascii"), value.encode("latin-1")) for name, value in {**_HEADERS, **headers}.items()]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    try:
        await _send_events(send, choices, answer, ping_s)
        last = _lines(answer.finish()) + _DONE
    except Exception as error:
        # Clients recognize a failed stream by this event and by the missing [DONE].
        await _end(send, _lines([openai_body(as_api_error(error))]))
        if not isinstance(error, LlmrunError):
            raise
        return False
    await _end(send, last)
    return True


async def _end(send: Send, last: bytes) -> None:
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_events(send: Send, choices: Choices, answer: StreamedAnswer, ping_s: float) -> None:
    clock = asyncio.get_running_loop().time
    ping_at = clock() + ping_s
    while (events := await choices.arrived(ping_at)) is not None:
        chunks = [chunk for choice, event in events for chunk in answer.feed(choice, event)]
        if chunks or clock() >= ping_at:
            await send({"type": "http.response.body", "body": _lines(chunks) or _PING, "more_body": True})
            ping_at = clock() + ping_s


def _lines(chunks: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks)
