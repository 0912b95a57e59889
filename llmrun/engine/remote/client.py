"""The HTTP client for OpenAI-compatible servers, which sends JSON requests and yields chunks of answers.

Requests of httpx2's blocking client cannot be cancelled from another thread. Requests therefore run in an event loop in
a separate thread, and the callers' threads read the answers from queues.

httpx2 is imported on first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from llmrun.base.errors import Cancelled, ContextExceeded, LlmrunError, ModelNotFound, NetworkError, UsageError
from llmrun.engine.remote.request import Endpoint
from llmrun.engine.remote.stream import Chunk, ConnectionLost, PromptState, Teller, follows, read_chunks, server_words

if TYPE_CHECKING:
    import ssl

    import httpx2

    Received = httpx2.Response | tuple[float, bytes] | Exception | None

CONNECT_S = 10.0
WRITE_S = 60.0
KEPT_S = 3.0  # How long to keep an idle connection. uvicorn closes idle connections after 5 s.


class Call:
    """A running request. `stop` may be called at any time from any thread or signal handler.

    stopped   True after `stop`
    received  what has been received of the current response and not yet been read: the response itself, the pieces of
              its body with their arrival times, None at its end, or an error; None also wakes the reader after `stop`
    prompt    what the server has reported about the prompt
    """

    def __init__(self) -> None:
        self.stopped = False
        self.prompt = PromptState()
        self.received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._deadline = (0.0, "")

    def expect(self, what: str, seconds: float) -> None:
        """Set the deadline to `seconds` from now. `what` describes the failure if the deadline passes."""
        self._deadline = (time.monotonic() + seconds, what)

    def stop(self) -> None:
        """Cancel the request and wake the thread that is waiting for it."""
        self.stopped = True
        self.received.put(None)

    def next(self, teller: Teller) -> httpx2.Response | tuple[float, bytes] | None:
        """Wait for the next part of the response.

        Raises NetworkError after the deadline, Cancelled after `stop`, and the errors of the connection.
        """
        deadline, what = self._deadline
        seconds = deadline - time.monotonic()
        try:
            if seconds <= 0:
                raise queue.Empty
            found = self.received.get(timeout=seconds)
        except queue.Empty:
            raise teller.fault("the server timed out", what) from None
        self.check(teller)
        if isinstance(found, Exception):
            raise found
        return found

    def check(self, teller: Teller) -> None:
        """Raise Cancelled after `stop`."""
        if self.stopped:
            raise Cancelled(f"request was stopped: {teller.host}")


TO_TRY = "check the address and that the server is running"


def as_llmrun_error(error: Exception, teller: Teller) -> LlmrunError:
    """Convert an error of httpx2 or the operating system to an LlmrunError, which never contains the key."""
    import httpx2

    root = _root(error)  # asyncio's own errors do not report why a connection failed
    said = "connection refused" if isinstance(root, ConnectionRefusedError) else str(root).strip() or str(error).strip()
    said = re.sub(r"^\[Errno -?\d+\] ", "", said).partition("\n")[0]
    words = teller.shown(said, 160) or type(error).__name__
    if isinstance(error, httpx2.ConnectTimeout):
        return teller.lost("unreachable", f"no connection within {CONNECT_S:g} s", TO_TRY)
    if isinstance(error, httpx2.ProxyError):
        return teller.lost("unreachable", f"proxy: {words}", "check the proxy variables")
    if isinstance(error, httpx2.ConnectError):
        return teller.lost("unreachable", words, TO_TRY)
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return UsageError(f"endpoint: {teller.host}: {words}")
    if isinstance(error, httpx2.HTTPError | httpx2.StreamError):
        return teller.lost("connection lost", words)
    return teller.fault("invalid network settings", words, "check SSL_CERT_FILE and the proxy variables")


def _root(error: BaseException) -> BaseException:
    """Return the original error in a chain of errors, or the first error of a group."""
    if isinstance(error, BaseExceptionGroup):
        return _root(error.exceptions[0])
    cause = error.__cause__ or error.__context__
    return error if cause is None else _root(cause)


OWNER: Final = "llmrun"  # `owned_by` of the models of our own servers


def chosen_model(models: Sequence[Mapping[str, Any]], endpoint: Endpoint, teller: Teller) -> Mapping[str, Any]:
    """Return the entry of the model that the endpoint names or, by default, of the only model or llmrun's first model.

    llmrun lists its default model first, and then all other models on its machine. Raises ModelNotFound, and
    UsageError if the user must choose a model.
    """
    if endpoint.model:
        models = [model for model in models if model["id"] == endpoint.model]
    if not models:
        what = f"no model {teller.shown(endpoint.model)}" if endpoint.model else "no models"
        raise ModelNotFound(f"model: {endpoint.host}: the server has {what}", hint="load a model into the server")
    if len(models) == 1 or models[0].get("owned_by") == OWNER:
        return models[0]
    names = [teller.shown(str(model["id"]), 40) for model in models]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    raise UsageError(
        f"model: {endpoint.host}: the server has {len(names)} models: {', '.join(names[:5])}{more}",
        hint=f"choose one: {endpoint.base}#{teller.shown(str(models[0]['id']), 80)}",
    )


# llmrun: llmrun_requests_running; vLLM: vllm:num_requests_running; llama-server: llamacpp:requests_processing;
# SGLang: sglang:num_running_reqs
_GAUGE = re.compile(
    r"^[a-z]+[:_](?:num_)?(?:requests_(?:running|waiting|processing|deferred)|running_reqs|queue_reqs)"
    r"(?:\{.*\})? ([\d.e+]+)",
    re.MULTILINE,
)


def unfinished_in_metrics(text: str) -> int | None:
    """Return how many requests run or wait according to metrics in Prometheus's format, or None if unknown."""
    values = [float(value) for value in _GAUGE.findall(text)]
    return round(sum(values)) if values else None


KEY_VARIABLE = "LLMRUN_API_KEY"
FIRST_S = 600.0  # The timeout for the first event is long because a server may have to load the model first.
BETWEEN_S = 120.0
_MOST_UNREAD = 1000  # pieces of an answer that wait to be read; the rest of the answer stays in the connection
_LAST_S = 0.1  # How long to wait after [DONE] for the end of the body, so that the connection can be reused.
_PAUSES_S = (0.2, 1.0, 2.0, 4.0, 8.0)  # pauses before attempts to resume a stream; a server may load its model
_RESTARTING = (502, 503, 504)  # statuses of a server that is not ready, or of a proxy for such a server
_PAUSE_STEP_S = 0.05
_MOST_ERROR = 64 << 10  # the maximum length of an error body in bytes
_MOST_MODELS = 4 << 20  # the maximum length of a list of models in bytes
_MOST_BYTES = 256 << 20  # the maximum length of a stream in bytes
_CHECK_API = "check that the server has an OpenAI-compatible API"


class RemoteModel:
    """One model of a server. Thread-safe. A connection serves one request at a time and stays open for later requests.

    left_out  fields beyond OpenAI's API that the server rejected and that are no longer sent
    """

    def __init__(
        self, endpoint: Endpoint, *, key: str | None = None, first_s: float = FIRST_S, between_s: float = BETWEEN_S
    ) -> None:
        """Create a client without contacting the server.

        first_s, between_s  the timeouts in seconds for the first event of an answer and for each later one

        Raises UsageError if the key contains characters that are not allowed in a header, and NetworkError if the proxy
        or the certificates cannot be used.
        """
        import anyio

        self.endpoint = endpoint
        self.left_out: tuple[str, ...] = ()
        self._first_s, self._between_s = first_s, between_s
        self._teller = Teller(endpoint.host, key)
        headers = request_headers(key)
        with self._translated():
            self._client = async_client(endpoint, headers)
        self._closed = False
        self._lock = threading.Lock()  # guards `_closed`
        self._exchanges: set[asyncio.Task[None]] = set()  # accessed only by the event loop's thread
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmrun-remote-loop", daemon=True)
        self._thread.start()
        # This loads the modules that httpx2 would otherwise load during the first request, which takes up to 0.1 s.
        asyncio.run_coroutine_threadsafe(anyio.sleep(0), self._loop).result()

    @classmethod
    def open(cls, endpoint: Endpoint, *, offline: bool = False) -> RemoteModel:
        """Create a client with the key from the environment.

        If the endpoint does not name a model, use the server's default model. Raises NetworkError, ModelNotFound and
        UsageError.
        """
        if offline and not endpoint.is_loopback:
            raise NetworkError(
                f"endpoint: {endpoint.host}: not available offline, because it is on another machine",
                hint="run again without --offline and LLMRUN_OFFLINE",
            )
        model = cls(endpoint, key=os.environ.get(KEY_VARIABLE) or None)
        try:
            if not endpoint.model:
                found = str(chosen_model(model.models(), endpoint, model._teller)["id"])
                model.endpoint = Endpoint(endpoint.base, found, endpoint.host, endpoint.is_loopback)
        except BaseException:
            model.close()
            raise
        return model

    def models(self) -> list[Mapping[str, Any]]:
        """Return the server's models, each with an `id`. Raises NetworkError or, if there is no list, ModelNotFound."""
        call = Call()
        call.expect(f"no list of models within {CONNECT_S:g} s", CONNECT_S)
        with self._request("GET", "/models", None, call) as response:
            self._check(response, call)
            body = b"".join(self._read(call, _MOST_MODELS))
        try:
            models: list[Mapping[str, Any]] = [*json.loads(body)["data"]]
            names = [model["id"] for model in models]
        except (ValueError, TypeError, KeyError, RecursionError):
            names = [None]
        if not all(isinstance(name, str) and name.isprintable() for name in names):
            raise self._teller.fault("not a list of models", self._teller.shown(body, 60), TO_TRY)
        return models

    def stream(
        self, path: str, body: Mapping[str, Any], extras: Mapping[str, Any], call: Call, *, most_events: int
    ) -> Iterator[Chunk]:
        """Request an answer and yield its chunks as they arrive.

        path         "/chat/completions" or "/completions"
        body         fields of OpenAI's API
        extras       fields of other APIs; if the server rejects them, the request is repeated without them, and they
                     are not sent again
        most_events  the maximum number of events in the stream

        If the connection breaks and the server sends event IDs, the stream continues on another connection.
        Raises Cancelled if `call` was stopped, NetworkError, ModelNotFound and ContextExceeded.
        """
        seen, lost, pauses = "", None, list(_PAUSES_S)
        while True:
            call.expect(f"no answer within {self._first_s:g} s", self._first_s)
            try:
                with self._accepted(path, body, extras, call, seen) as response:
                    self._check_kind(response, call)
                    for chunk in self._chunks(call, most_events):
                        if lost is not None and not follows(chunk.event_id, seen):
                            raise self._teller.fault("answer was cut off", "the server did not continue it")
                        yield chunk
                        seen, lost, pauses = chunk.event_id, None, list(_PAUSES_S)
                return
            except NetworkError as error:
                lost = lost or error
                if not (seen and pauses and isinstance(error, ConnectionLost)):
                    raise lost from None
            self._pause(pauses.pop(0), call)

    def close(self) -> None:
        """Stop all requests and close all connections. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        exchanges = [*self._exchanges]
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
        await self._client.aclose()

    def _pause(self, seconds: float, call: Call) -> None:
        """Wait before the next attempt. Raises Cancelled if `call` is stopped meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            call.check(self._teller)
            time.sleep(_PAUSE_STEP_S)

    def _chunks(self, call: Call, most_events: int) -> Iterator[Chunk]:
        pieces = self._pieces(call)
        finished = False

        def note_prompt(state: PromptState) -> None:
            if state != call.prompt:  # a prompt may take longer than any timeout, as long as it advances
                call.prompt = state
                call.expect(f"the prompt did not advance for {self._first_s:g} s", self._first_s)

        try:
            for count, chunk in enumerate(read_chunks(pieces, self._teller, note_prompt), 1):
                call.expect(f"nothing received for {self._between_s:g} s in the middle of an answer", self._between_s)
                if count > most_events:
                    raise self._teller.fault("answer is too long", f"more than {most_events:,} events")
                finished = finished or chunk.finish is not None
                yield chunk
            call.expect("the server kept sending after the end of the stream", _LAST_S)
            for _ in pieces:  # Read to the end of the body, so that the connection can be reused.
                pass
        except NetworkError:
            if not finished:
                raise  # Once the answer is finished, errors no longer matter.

    def _pieces(self, call: Call) -> Iterator[tuple[float, bytes]]:
        """Yield the pieces of a body with their arrival times."""
        total = 0
        with self._translated():
            while isinstance(piece := call.next(self._teller), tuple):
                total += len(piece[1])
                if total > _MOST_BYTES:
                    raise self._teller.fault("answer is too long", f"more than {_MOST_BYTES:,} bytes")
                yield piece

    def _read(self, call: Call, most: int) -> Iterator[bytes]:
        """Yield the first `most` bytes of a body that is not a stream."""
        total = 0
        for _, data in self._pieces(call):
            yield data[: most - total]
            total += len(data)
            if total >= most:
                return

    # Requests

    @contextlib.contextmanager
    def _accepted(
        self, path: str, body: Mapping[str, Any], extras: Mapping[str, Any], call: Call, seen: str
    ) -> Iterator[httpx2.Response]:
        """Yield a successful response. If the server rejects `extras`, repeat the request without them.

        seen  the ID of the last event that was received; the response continues after it
        """
        wanted = {name: value for name, value in extras.items() if name not in self.left_out}
        with contextlib.ExitStack() as stack:
            content = json.dumps({**body, **wanted}).encode()
            response = stack.enter_context(self._request("POST", path, content, call, seen))
            if response.status_code in (400, 422) and wanted:
                stack.close()
                content = json.dumps(dict(body)).encode()
                response = stack.enter_context(self._request("POST", path, content, call, seen))
                if response.is_success:
                    self.left_out = (*self.left_out, *wanted)
            self._check(response, call)
            yield response

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, content: bytes | None, call: Call, seen: str = ""
    ) -> Iterator[httpx2.Response]:
        """Send a request and yield its response, whose body `call` receives."""
        headers = {} if content is None else {"content-type": "application/json"}
        if seen:
            headers["last-event-id"] = seen
        received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        call.received = received
        call.check(self._teller)  # `stop` wakes only the reader of the current queue
        with self._lock:
            if self._closed:
                raise Cancelled(f"request was stopped: {self.endpoint.host}")
            exchange = self._exchange(method, self.endpoint.base + path, content, headers, received)
            running = asyncio.run_coroutine_threadsafe(exchange, self._loop)
        try:
            with self._translated():
                response = call.next(self._teller)
            yield cast("httpx2.Response", response)
        finally:
            running.cancel()  # closes the connection, unless the response is complete

    async def _exchange(
        self,
        method: str,
        url: str,
        content: bytes | None,
        headers: Mapping[str, str],
        received: queue.SimpleQueue[Received],
    ) -> None:
        """Send a request, and put the response, its pieces, and its end or the error into a queue."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)
        try:
            async with contextlib.aclosing(await self._send(method, url, content, headers)) as response:
                received.put(response)
                async for data in response.aiter_raw():
                    received.put((time.perf_counter(), data))
                    while received.qsize() > _MOST_UNREAD:
                        await asyncio.sleep(_PAUSE_STEP_S)
            received.put(None)
        except asyncio.CancelledError:
            received.put(Cancelled(f"request was stopped: {self.endpoint.host}"))
            raise
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            received.put(error)

    async def _send(self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> httpx2.Response:
        import httpx2

        is_new = False

        async def watch(event: str, _: object) -> None:
            nonlocal is_new
            is_new = is_new or event.endswith("connect_tcp.started")

        extensions = {"trace": watch}
        while True:
            request = self._client.build_request(method, url, content=content, headers=headers, extensions=extensions)
            try:
                return await self._client.send(request, stream=True)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                if is_new:
                    raise  # If the connection was idle, the server has closed it, so try another one.

    # Errors

    def _check(self, response: httpx2.Response, call: Call) -> None:
        """Raise the error that matches the status of an unsuccessful response."""
        if response.is_success:
            return
        status = response.status_code
        if response.is_redirect:
            where = self._teller.shown(response.headers.get("location", "nowhere"))
            raise self._teller.fault(f"redirected (HTTP {status})", where, "if you trust that address, use it instead")
        body = b"".join(self._read(call, _MOST_ERROR))
        said, code = _refusal(body)
        words = f"{self._teller.shown(said) or 'no reason given'} (HTTP {status})"
        model = self._teller.shown(self.endpoint.model)
        if code in ("context_length_exceeded", "exceed_context_size_error"):
            raise ContextExceeded(f"prompt does not fit in the context: {model} @ {self.endpoint.host}: {words}")
        if status == 404 and ("model" in said.lower() or "model" in code):
            raise ModelNotFound(
                f"model: {model}: not found at {self.endpoint.host}: {words}",
                hint=f"{self.endpoint.base}/models lists the available models",
            )
        what = {401: "not authorised", 403: "access denied", 404: "address not found", 429: "too many requests"}
        hint = {401: f"set {KEY_VARIABLE} to your key", 403: f"check {KEY_VARIABLE}", 404: _CHECK_API}
        default = "the server failed" if status >= 500 else "request rejected"
        failure = self._teller.lost if status in _RESTARTING else self._teller.fault
        raise failure(what.get(status, default), words, hint.get(status, ""))

    def _check_kind(self, response: httpx2.Response, call: Call) -> None:
        """Raise NetworkError unless the response is an uncompressed event stream."""
        kind = response.headers.get("content-type", "none")
        coding = response.headers.get("content-encoding", "identity")
        if kind.lower().startswith("text/event-stream") and coding.lower() == "identity":
            return
        if coding.lower() != "identity":
            seen = f"content encoding {self._teller.shown(coding, 40)}, which was not requested"
            raise self._teller.fault("answer is compressed", seen)
        said, _ = _refusal(b"".join(self._read(call, _MOST_ERROR)))
        if said:
            raise self._teller.fault("the server reported an error", self._teller.shown(said))
        seen = f"content type {self._teller.shown(kind, 60)}, text/event-stream expected"
        raise self._teller.fault("answer is not an event stream", seen, _CHECK_API)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the errors of httpx2 and of the network into LlmrunError."""
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError, ImportError) as error:
            # Protocol errors may quote the server, and the server may quote the key, which --debug would then show.
            raise as_llmrun_error(error, self._teller) from (error if self._teller.is_harmless(error) else None)


def request_headers(key: str | None, origin: str = f"environment: {KEY_VARIABLE}") -> dict[str, str]:
    """Return the headers of all requests.

    Raises UsageError for a key with characters that are not allowed. `origin` describes the source of the key.
    """
    # "identity" means no compression. A compressed stream could unpack to gigabytes, and chunks could be delayed.
    headers = {"accept-encoding": "identity", "accept": "text/event-stream, application/json"}
    if key is None:
        return headers
    # Quotes and backslashes are not allowed, because an escaped key could not be found and redacted in messages.
    if not re.fullmatch(r"[!#-&(-\[\]-~]+", key):
        raise UsageError(f"{origin}: contains a character that is not allowed in a key")
    return {**headers, "authorization": f"Bearer {key}"}


def tls_settings(endpoint: Endpoint) -> ssl.SSLContext:
    """Return the TLS settings. Plain HTTP to localhost needs no certificates, which take 15 ms to read."""
    import httpx2

    if endpoint.is_loopback and endpoint.base.startswith("http:"):
        import ssl

        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # This context trusts no certificates.
    return httpx2.create_ssl_context()


def _refusal(body: bytes) -> tuple[str, str]:
    """Return the message from an error body, and the code or type, with "" for a missing value."""
    try:
        table = json.loads(body)
        said = server_words(table)
    except (ValueError, RecursionError):  # The body is empty, or not JSON, such as an HTML page.
        return "", ""
    error = table.get("error") if isinstance(table, dict) else None
    codes = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return said, next((code for code in codes if isinstance(code, str)), "")


def async_client(
    endpoint: Endpoint, headers: Mapping[str, str], *, most_open: int | None = None, most_idle: int | None = None
) -> httpx2.AsyncClient:
    """Return a client for one server. Callers set their own read timeouts.

    headers    of all requests, from `request_headers`
    most_open  the maximum number of connections
    most_idle  how many of them stay open between requests

    Raises the errors of httpx2 if the proxy or the certificates cannot be used.
    """
    import httpx2

    return httpx2.AsyncClient(
        headers=headers,
        verify=tls_settings(endpoint),
        trust_env=not endpoint.is_loopback,
        follow_redirects=False,  # the key must not be sent to other hosts
        timeout=httpx2.Timeout(None, connect=CONNECT_S, write=WRITE_S, pool=None),
        limits=httpx2.Limits(max_connections=most_open, max_keepalive_connections=most_idle, keepalive_expiry=KEPT_S),
    )
