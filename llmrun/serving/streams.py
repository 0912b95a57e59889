"""Streams answers, as server-sent events or in another form.

Backpressure needs no code here: `send` waits while the connection's buffer is full, and meanwhile the events of the
answer collect in memory, so that decoding never waits for a client. A client that takes nothing for a minute is cut off
by `connections.py`, which ends its requests like any other disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Send

from llmrun.base.errors import LlmrunError
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.choices import Choices
from llmrun.serving.protocol.parsed import Answer, FailingAnswer
from llmrun.serving.protocol.wire import WireFormat
from llmrun.serving.refusals import as_api_error
from llmrun.serving.resuming import EventNumbers

_HEADERS = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would collect events before it passes them on
}


@dataclass(frozen=True, slots=True)
class Stream:
    """The form of one stream.

    large   whether the request is large. The first and last events of some APIs repeat much of it
    ping_s  the longest silence in seconds
    """

    wire: WireFormat
    numbers: EventNumbers
    headers: Mapping[str, str]
    large: bool
    ping_s: float

    async def send(self, send: Send, choices: Choices, answer: Answer) -> bool:
        """Send an answer whose requests have been accepted. Returns False if it failed.

        The error is then the last event of the stream. Bugs are raised as well.
        """
        headers = {"content-type": self.wire.media_type, **_HEADERS, **self.headers}
        fields = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        try:
            await self._send_events(send, choices, answer)
            # The last chunks of some APIs repeat the whole answer.
            is_long = self.large or choices.is_long
            last = await off_the_loop(is_long, lambda: self._framed(answer.finish())) + self.wire.end
        except Exception as error:
            # Clients recognize a failed stream by its last event and by the missing end.
            await _end(send, b"".join(self.wire.frame(chunk, "") for chunk in self._last_words(answer, error)))
            if not isinstance(error, LlmrunError):
                raise
            return False
        await _end(send, last)
        return True

    async def _send_events(self, send: Send, choices: Choices, answer: Answer) -> None:
        clock = asyncio.get_running_loop().time
        ping_at = clock() + self.ping_s
        while (events := await choices.arrived(ping_at)) is not None:
            chunks: list[Mapping[str, Any]] = []
            try:
                for choice, event in events:
                    chunks += answer.feed(choice, event)
            finally:  # what arrived together with an error is sent, too
                is_first = not self.numbers.last
                data = await off_the_loop(self.large and is_first, partial(self._framed, chunks))
                if data or clock() >= ping_at:
                    ping_at = clock() + self.ping_s
                    if data or self.wire.ping:
                        await send({"type": "http.response.body", "body": data or self.wire.ping, "more_body": True})

    def _last_words(self, answer: Answer, error: Exception) -> Sequence[Mapping[str, Any]]:
        """Return the chunks that report an error."""
        told = as_api_error(error)
        return answer.failed(told) if isinstance(answer, FailingAnswer) else [self.wire.error_chunk(told)]

    def _framed(self, chunks: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(self._frames(chunks))

    def _frames(self, chunks: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        for chunk in chunks:
            event_id = self.numbers.next_id()
            if event_id is not None:
                yield self.wire.frame(chunk, event_id)


async def _end(send: Send, last: bytes) -> None:
    await send({"type": "http.response.body", "body": last, "more_body": False})
