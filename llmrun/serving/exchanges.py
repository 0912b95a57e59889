"""The outermost layer of the application: identifies, counts and logs every request, and catches every error."""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmrun.errors import LlmrunError
from llmrun.gguf.problems import shown
from llmrun.serving.disconnects import ClientGone
from llmrun.serving.metrics import Metrics
from llmrun.serving.refusals import error_response

_KEY = "llmrun.exchange"
_CLIENT_GONE = 499  # nginx's status for a client that left before the response
_POLLED = ("/health", "/metrics")  # monitoring asks for these every few seconds


@dataclass(slots=True)
class Exchange:
    """One request and its response.

    route    the pattern of the route, for metrics, because clients choose the paths
    tenant   whose request it is; see Request.tenant
    tokens   counts for the log, such as "12+345 tokens"; "" for requests without an answer
    status   the response's status; 0 until it has begun
    outcome  a word for the log if the exchange did not end well, such as "failed"
    """

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    route: str = "other"
    tenant: str = ""
    tokens: str = ""
    status: int = 0
    outcome: str = ""
    began: float = field(default_factory=time.perf_counter)


def exchange_of(scope: Scope) -> Exchange:
    exchange = scope[_KEY]
    assert isinstance(exchange, Exchange)
    return exchange


class Exchanges:
    """ASGI middleware that gives every request an Exchange.

    log    called with a line for the user
    trace  called with the traceback of a bug
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, log: Callable[[str], None], trace: Callable[[str], None]
    ) -> None:
        self._app, self._metrics, self._log, self._trace = app, metrics, log, trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = scope[_KEY] = Exchange()
        scope["app"] = self  # otherwise, Starlette's router answers unknown paths itself, in plain text
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
        """Run the application, and answer its errors."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", exchange.id.encode("ascii")),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientGone:
            exchange.outcome = "client left"
        except Exception as error:  # noqa: BLE001  a bug must not take the server down
            if not isinstance(error, LlmrunError):
                self._trace(traceback.format_exc())
            if not exchange.status:
                await error_response(error)(scope, receive, sending)
            exchange.outcome = "failed"


def _line(scope: Scope, exchange: Exchange, status: int) -> str:
    """Return the line of an exchange for the log: never a body, a query or a header, which may contain secrets."""
    path = shown(scope["path"])
    client = scope["client"][0] if scope.get("client") else "-"
    seconds = f"{time.perf_counter() - exchange.began:.2f} s"
    words = [time.strftime("%H:%M:%S"), client, shown(scope["method"]), path, str(status), exchange.tokens, seconds]
    return "  ".join(word for word in (*words, exchange.outcome) if word)
