"""The outermost layer of the application: identifies, counts and logs every request, and catches every error.

This layer also detects when a client disconnects, and then cancels the client's requests in any phase: in the queue,
during the prompt, or during the answer.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmrun.base.errors import LlmrunError, Overloaded, shown
from llmrun.serving.metrics import Metrics
from llmrun.serving.protocol.anthropic.answers import ANTHROPIC
from llmrun.serving.protocol.ollama.answers import OLLAMA, PREFIX
from llmrun.serving.protocol.openai_responses.answers import RESPONSES
from llmrun.serving.protocol.parsed import ignored_names
from llmrun.serving.protocol.wire import LLAMA_SERVER, OPENAI, WireFormat
from llmrun.serving.refusals import error_response

# Path prefixes of the APIs with a wire format other than OPENAI
_PREFIXES: Final[Mapping[str, WireFormat]] = {
    "/v1/messages": ANTHROPIC,
    "/completions": OPENAI,
    **dict.fromkeys(("/completion", "/infill", "/props", "/slots", "/apply-template"), LLAMA_SERVER),
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
    PREFIX: OLLAMA,
}


_ABSOLUTE: Final = re.compile(rb"https?://[^/]*", re.IGNORECASE)  # begins targets in absolute form, as sent to proxies
_SLASHES: Final = re.compile(rb"/+")


def normalized(target: bytes) -> str:
    """Return the path of a request's target, without scheme, host, repeated slashes and the slash at the end.

    Clients often join base URLs and paths carelessly. Percent-encoded slashes are part of a name and remain.
    """
    path = _SLASHES.sub(b"/", _ABSOLUTE.sub(b"", target, count=1))
    return unquote(path.removesuffix(b"/").decode("ascii")) or "/"


def wire_of(path: str) -> WireFormat:
    """Return the wire format of the API that a path belongs to. Errors of unknown routes also use the API's format."""
    return next((wire for prefix, wire in _PREFIXES.items() if path.startswith(prefix)), OPENAI)


Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before the response was complete."""


class Presence:
    """Watches whether the client of one request is still connected, starting at the end of the request's body.

    A task awaits `receive`, because the server reports a closed connection only there. The task matters most for
    responses that are not streamed, where no failing `send` would reveal a closed connection.
    """

    def __init__(self, receive: Receive) -> None:
        self._left = asyncio.create_task(_disconnected(receive))

    async def during(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`. If the client leaves first, cancel `work` and raise ClientGone."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.cancel()
        await asyncio.wait({self._left})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_PAUSES_S: Final = (0.01, 0.03, 0.06, 0.15)  # together a quarter of a second


class SecondChances:
    """ASGI middleware that retries a request that the server was too busy for, if a client disconnects a moment later.

    If a client cancels a request and repeats it immediately, the first request must not cause the refusal of the
    second. Particularly behind a proxy, the second request may arrive before the server notices that the connection of
    the first is closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._n_left = 0  # the number of clients that disconnected before the end of their responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pauses = iter(_PAUSES_S)
        while True:
            n_left = self._n_left
            try:
                await self._app(scope, receive, send)
            except ClientGone:
                self._n_left += 1
                raise
            except Overloaded as error:
                if not await self._another_leaves(n_left, pauses):
                    await error_response(error, exchange_of(scope).wire)(scope, receive, send)
                    return
            else:
                return

    async def _another_leaves(self, n_left: int, pauses: Iterator[float]) -> bool:
        """Wait until more than `n_left` clients have disconnected. Returns False if that takes too long."""
        for pause_s in pauses:
            await asyncio.sleep(pause_s)
            if self._n_left != n_left:
                return True
        return False


_KEY = "llmrun.exchange"
_CLIENT_GONE = 499  # nginx's status for a client that left before the end of the response
# Monitors and other servers request these paths every few seconds.
_POLLED = ("/health", "/v1/health", "/metrics", "/v1/models", "/props", "/slots")


class AnswerId(str):
    """The random ID of an answer, including the time of the request."""

    __slots__ = ()

    @classmethod
    def new(cls) -> AnswerId:
        return cls(f"{int(time.time()):08x}{secrets.token_hex(8)}")

    @property
    def created(self) -> int:
        """The time of the request, in seconds since 1970."""
        return int(self[:8], 16)


@dataclass(slots=True)
class Exchange:
    """One request and its response.

    wire      the wire format of the API that the path belongs to
    route     the pattern of the route, for metrics, because clients choose the paths
    tenant    the owner of the request, as in Request.tenant
    upstream  the hosts of the upstreams that the request was forwarded to, or "" for requests not forwarded
    left_out  the types of tools that were left out, for the log
    tokens    counts for the log, such as "12+345 tokens"; "" for requests without an answer
    prefix    how much of the prompt was reused, for the log, such as "reused 8 of 12"; no text of a prompt
    images    the images of the prompt and their encoding, for the log
    status    the response's status; 0 until the response has begun, and 499 if the client left before its end
    outcome   a word for the log if the exchange failed, such as "client left"
    """

    wire: WireFormat
    id: AnswerId = field(default_factory=AnswerId.new)
    route: str = "other"
    tenant: str = ""
    upstream: str = ""
    left_out: tuple[str, ...] = ()
    tokens: str = ""
    prefix: str = ""
    images: str = ""
    status: int = 0
    outcome: str = ""
    began: float = field(default_factory=time.perf_counter)


def exchange_of(scope: Scope) -> Exchange:
    exchange = scope[_KEY]
    assert isinstance(exchange, Exchange)
    return exchange


class Exchanges:
    """ASGI middleware that gives every request an Exchange.

    log    called with the log line of each exchange
    trace  called with the traceback of a bug
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, log: Callable[[str], None], trace: Callable[[str], None]
    ) -> None:
        self._app, self._metrics, self._log, self._trace = app, metrics, log, trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = normalized(scope["raw_path"])
        exchange = scope[_KEY] = Exchange(wire_of(scope["path"]))
        scope["app"] = self  # without an app, Starlette's router answers unknown paths in plain text
        self._metrics.open_requests += 1
        try:
            await self._answer(exchange, scope, receive, send)
        finally:
            self._metrics.open_requests -= 1
            status = exchange.status or _CLIENT_GONE
            self._metrics.count_request(exchange.route, status)
            if scope["path"] not in _POLLED or status not in (200, _CLIENT_GONE):
                self._log(_line(scope, exchange, status))

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and send an error response if the application raises an error."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", exchange.id.encode("ascii")),
                    (b"request-id", exchange.id.encode("ascii")),  # Anthropic's name
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientGone:
            exchange.status, exchange.outcome = _CLIENT_GONE, "client left"
        except Exception as error:  # noqa: BLE001  a bug must not take the server down
            if not isinstance(error, LlmrunError):
                self._trace(traceback.format_exc())
            if not exchange.status:
                await error_response(error, exchange.wire)(scope, receive, sending)
            exchange.outcome = "failed"


def _line(scope: Scope, exchange: Exchange, status: int) -> str:
    """Return the log line of an exchange, without bodies, queries or headers, because these may contain secrets."""
    path = shown(scope["path"])
    client = scope["client"][0] if scope.get("client") else "-"
    seconds = f"{time.perf_counter() - exchange.began:.2f} s"
    via = f"via {exchange.upstream}" if exchange.upstream else ""
    words = [
        time.strftime("%H:%M:%S"),
        client,
        shown(scope["method"]),
        path,
        str(status),
        exchange.tokens,
        exchange.prefix,
        exchange.images,
        f"without {ignored_names(exchange.left_out)}" if exchange.left_out else "",
        via,
        seconds,
    ]
    return "  ".join(word for word in (*words, exchange.outcome) if word)
