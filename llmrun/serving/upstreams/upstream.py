"""One upstream: its client, its state, and the requests that this server sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from llmrun.base.errors import LlmrunError, NetworkError
from llmrun.engine.remote.client import (
    BETWEEN_S,
    FIRST_S,
    as_llmrun_error,
    async_client,
    request_headers,
    unfinished_in_metrics,
)
from llmrun.engine.remote.request import Endpoint
from llmrun.engine.remote.stream import Teller
from llmrun.serving.gate import UPSTREAM_FLAG
from llmrun.serving.protocol.errors import InvalidField, parse_json

UNASKED: Final = "not asked yet"
MOST_ERROR: Final = 64 << 10  # the maximum size of an error's body in bytes
_MOST_MODELS: Final = 4 << 20  # the maximum size of a list of models in bytes
_MOST_METRICS: Final = 1 << 20  # bytes
_DENIED: Final = (401, 403)
_UNREADY: Final = 503
# Paths of routes outside /v1.
_AT_ROOT: Final = (
    "/api/",
    "/completion",
    "/infill",
    "/apply-template",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
)
_COMPLETIONS: Final = "/completions"  # a route of OpenAI's API, unlike /completion


class Cut(NetworkError):
    """The connection failed, or the upstream was silent for too long.

    sent  True if the upstream may have begun to work on the request
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Misbehaved(NetworkError):
    """The upstream's response is not a valid answer of any API."""


@dataclass(slots=True)
class Counts:
    """The counters of one upstream, for /metrics.

    requests  the number of requests that were sent to the upstream
    moved     the number of sent requests that another upstream answered from the beginning
    resumed   the number of sent requests that another upstream resumed in the middle of a stream
    """

    requests: int = 0
    moved: int = 0
    resumed: int = 0


@dataclass(slots=True)
class Upstream:
    """One upstream.

    number     the position among the --upstream flags, from 0
    models     the listed models by name; empty while the upstream is down
    problem    the reason why the upstream is down; "" while the upstream is up
    in_flight  the number of this server's requests in progress
    others     the number of other clients' requests, as of the last health check
    """

    number: int
    endpoint: Endpoint
    key: str | None = field(default=None, repr=False)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problem: str = UNASKED
    in_flight: int = 0
    others: int = 0
    counts: Counts = field(default_factory=Counts)
    client: httpx2.AsyncClient = field(init=False)
    heard_at: float = 0.0
    _teller: Teller = field(init=False)
    _deadlines: set[asyncio.Timeout] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        """Create the client. Raises UsageError and NetworkError if the key, proxy or certificates cannot be used."""
        self._teller = Teller(self.endpoint.host, self.key)
        headers = request_headers(self.key, UPSTREAM_FLAG)
        try:
            self.client = async_client(self.endpoint, headers)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, ImportError) as error:
            raise as_llmrun_error(error, self._teller) from None

    @property
    def is_up(self) -> bool:
        return not self.problem

    @property
    def load(self) -> int:
        """The number of requests that the upstream is working on, as far as this server knows."""
        return self.in_flight + self.others

    def url(self, path: str) -> str:
        """Return the upstream's URL for a path of this server."""
        base, is_at_root = self.endpoint.base, path.startswith(_AT_ROOT) and path != _COMPLETIONS
        return base.removesuffix("/v1") + path if is_at_root else base + path.removeprefix("/v1")

    def shown(self, text: str | bytes) -> str:
        """Return untrusted text as one line, without the key."""
        return self._teller.shown(text, 200)

    def redacted(self, body: bytes) -> bytes:
        """Return a body with the key removed, because some servers quote the key in errors."""
        return body.replace(self.key.encode(), b"(the key)") if self.key else body

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Count a request as being in progress."""
        self.in_flight += 1
        self.counts.requests += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def cut_all(self) -> None:
        """Cut all requests that are waiting for this upstream."""
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)

    @asynccontextmanager
    async def answering(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], *, first_s: float = FIRST_S
    ) -> AsyncIterator[Answering]:
        """Send a request, and yield the response before its body has arrived.

        first_s  the longest silence of the upstream before the body, in seconds

        Raises Cut, and Misbehaved for a redirect or a compressed body.
        """
        with self._translated():
            async with self.patient(first_s):
                response = await self._send(method, self.url(path), content, headers)
        try:
            if response.is_redirect:
                raise Misbehaved(f"redirected (HTTP {response.status_code})")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise Misbehaved("the answer is compressed, which was not requested")
            yield Answering(self, response, first_s)
        finally:
            await response.aclose()

    async def _send(self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> httpx2.Response:
        """Send a request, and retry on another connection if a reused connection has just been closed.

        Servers may close an idle connection while the next request is in transit, but such a server is not down. The
        loop ends because each retry uses up one idle connection.
        """
        while True:
            connecting = False

            async def traced(event: str, _: object) -> None:
                nonlocal connecting
                connecting = connecting or event == "connection.connect_tcp.started"

            request = self.client.build_request(
                method, url, content=content, headers=headers, extensions={"trace": traced}
            )
            try:
                return await self.client.send(request, stream=True)
            except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
                if connecting:
                    raise

    @asynccontextmanager
    async def patient(self, seconds: float) -> AsyncIterator[None]:
        """Limit the time spent waiting for the upstream. `cut_all` ends the wait early."""
        async with asyncio.timeout(seconds) as deadline:
            self._deadlines.add(deadline)
            try:
                yield
            finally:
                self._deadlines.discard(deadline)
        self.heard_at = asyncio.get_running_loop().time()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert the errors of a request to Cut, with messages that contain neither the host nor the key."""
        try:
            yield
        except TimeoutError:
            raise Cut("no answer for too long", sent=True) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError) as error:
            words = str(as_llmrun_error(error, self._teller)).replace(f": {self.endpoint.host}:", ":")
            unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)
            raise Cut(words, sent=not unsent) from None

    async def ask_models(self, headers: Mapping[str, str], seconds: float) -> dict[str, Mapping[str, Any]]:
        """Return the upstream's listed models by name. Raises Cut, and Misbehaved if the upstream is not ready."""
        status, body = await self._ask("/health", headers, seconds, MOST_ERROR)
        if status == _UNREADY:  # servers without /health return another status
            raise Misbehaved(f"not ready: {self.shown(body)[:60]}")
        status, body = await self._ask("/v1/models", headers, seconds, _MOST_MODELS)
        if status in _DENIED:
            raise Misbehaved(f"not authorized (HTTP {status}); see {UPSTREAM_FLAG}")
        if status != 200:
            raise Misbehaved(f"HTTP {status} for /v1/models")
        try:
            listed = parse_json(self.redacted(body)).get("data")
        except InvalidField:
            listed = None
        if not isinstance(listed, list):
            raise Misbehaved("no list of models; check that the server has an OpenAI-compatible API")
        models = [model for model in listed if isinstance(model, dict)]
        named = {name: model for model in models if isinstance(name := model.get("id"), str) and name.isprintable()}
        return {name: {**model, "created": _time(model.get("created"))} for name, model in named.items()}

    async def ask_load(self, headers: Mapping[str, str], seconds: float) -> None:
        """Update the number of other clients' requests, which most servers do not report."""
        in_flight = self.in_flight
        try:
            status, text = await self._ask("/metrics", headers, seconds, _MOST_METRICS)
        except LlmrunError:
            return  # only /v1/models decides whether the upstream is up
        told = unfinished_in_metrics(text.decode(errors="replace")) if status == 200 else None
        self.others = max(0, (told or 0) - in_flight)

    async def _ask(self, path: str, headers: Mapping[str, str], seconds: float, most: int) -> tuple[int, bytes]:
        async with self.answering("GET", path, None, headers, first_s=seconds) as answering:
            return answering.status, await answering.whole(most)


def _time(value: object) -> int:
    """Return `value` if it is a valid time in seconds since 1970, and 0 otherwise."""
    return value if isinstance(value, int) and 0 <= value < 1 << 33 else 0


class Answering:
    """A response of an upstream."""

    def __init__(self, upstream: Upstream, response: httpx2.Response, first_s: float) -> None:
        self._upstream, self._response = upstream, response
        self._pieces = response.aiter_raw()
        self._patience_s = first_s

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> httpx2.Headers:
        return self._response.headers

    @property
    def kind(self) -> str:
        """The content type, without its parameters."""
        return str(self.headers.get("content-type", "none")).partition(";")[0].strip().lower()

    @property
    def has_length(self) -> bool:
        """True if a truncated body can be detected. A body without a length ends when the connection closes."""
        return "content-length" in self.headers or "transfer-encoding" in self.headers

    async def piece(self) -> bytes | None:
        """Return the next part of the body, or None at its end. Raises Cut."""
        with self._upstream._translated():
            async with self._upstream.patient(self._patience_s):
                piece = await anext(self._pieces, None)
        self._patience_s = min(self._patience_s, BETWEEN_S)
        return piece

    def expect(self, seconds: float) -> None:
        """Limit the upstream's silence to `seconds` from now on."""
        self._patience_s = seconds

    async def whole(self, most: int) -> bytes:
        """Return the whole body. Raises Cut, and Misbehaved if the body is longer than `most` bytes."""
        body = bytearray()
        while (piece := await self.piece()) is not None:
            body += piece
            if len(body) > most:
                raise Misbehaved(f"the answer has more than {most:,} bytes")
        return bytes(body)
