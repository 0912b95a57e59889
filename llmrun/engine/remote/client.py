"""The HTTP client for models on OpenAI-compatible servers. It sends JSON requests and yields chunks of answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import Cancelled, ContextExceeded, ModelNotFound, NetworkError, UsageError
from llmrun.engine.remote.connection import CONNECT_S, Call, Line, Watch
from llmrun.engine.remote.event_ids import follows
from llmrun.engine.remote.listed_models import default_model
from llmrun.engine.remote.problems import TO_TRY, in_our_words
from llmrun.engine.remote.stream import Chunk, ConnectionLost, Teller, read_chunks, server_words
from llmrun.engine.remote.url import Endpoint

if TYPE_CHECKING:
    import ssl

    import httpx2

KEY_VARIABLE = "LLMRUN_API_KEY"
FIRST_S = 600.0  # The timeout for the first event. It is long because a server may have to load the model first.
BETWEEN_S = 120.0
_LAST_S = 0.1  # How long to wait after [DONE] for the end of the body, so that the connection can be reused.
_PAUSES_S = (0.2, 1.0, 2.0, 4.0, 8.0)  # before attempts to resume a stream; a server may load its model
_RESTARTING = (502, 503, 504)  # statuses of a server, or of a proxy before it, that is not ready
_PAUSE_STEP_S = 0.05
_MOST_ERROR = 64 << 10  # the maximum length of an error body in bytes
_MOST_MODELS = 4 << 20  # the maximum length of a list of models in bytes
_MOST_BYTES = 256 << 20  # the maximum length of a stream in bytes
_CHECK_API = "check that the server has an OpenAI-compatible API"


class RemoteModel:
    """One model of a server. Thread-safe: each running request has its own connection.

    left_out  fields beyond OpenAI's API that the server rejected and that are no longer sent
    """

    def __init__(
        self, endpoint: Endpoint, *, key: str | None = None, first_s: float = FIRST_S, between_s: float = BETWEEN_S
    ) -> None:
        """Create a client without sending anything.

        first_s, between_s  the timeouts in seconds for the first event of an answer and for each later one

        Raises UsageError if the key contains characters that are not allowed in a header, and NetworkError if the proxy
        or the certificates cannot be used.
        """
        self.endpoint = endpoint
        self.left_out: tuple[str, ...] = ()
        self._first_s, self._between_s = first_s, between_s
        self._teller = Teller(endpoint.host, key)
        self._headers = request_headers(key)
        self._lock = threading.Lock()
        self._watch = Watch()
        self._closed = False
        with self._translated(Call()):
            self._tls = tls_settings(endpoint)
            self._idle = [self._new_line()]  # Create the first connection now, so that no request waits for it.

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
                model.endpoint = Endpoint(endpoint.base, model._default_model(), endpoint.host, endpoint.is_loopback)
        except BaseException:
            model.close()
            raise
        return model

    def models(self) -> list[Mapping[str, Any]]:
        """Return the server's models, each with an `id`. Raises NetworkError, and ModelNotFound if there is no list."""
        call = Call()
        call.expect(f"no list of models within {CONNECT_S:g} s", CONNECT_S)
        with self._request("GET", "/models", None, call) as response:
            self._check(response, call)
            body = b"".join(self._read(response, call, _MOST_MODELS))
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

        If the connection breaks and the server gives its events IDs, the stream continues on another connection.
        Raises Cancelled if `call` was stopped, NetworkError, ModelNotFound and ContextExceeded.
        """
        seen, lost, pauses = "", None, list(_PAUSES_S)
        while True:
            call.expect(f"no answer within {self._first_s:g} s", self._first_s)
            try:
                with self._accepted(path, body, extras, call, seen) as response:
                    self._check_kind(response, call)
                    for chunk in self._chunks(response, call, most_events):
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
        self._closed = True
        self._watch.close()
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _pause(self, seconds: float, call: Call) -> None:
        """Wait before the next attempt. Raises Cancelled if `call` is stopped meanwhile."""
        until = time.monotonic() + seconds
        call.expect("no new connection", seconds + CONNECT_S)
        while time.monotonic() < until:
            self._check_call(call)
            time.sleep(_PAUSE_STEP_S)

    def _chunks(self, response: httpx2.Response, call: Call, most_events: int) -> Iterator[Chunk]:
        pieces = self._pieces(response, call)
        finished = False
        try:
            for count, chunk in enumerate(read_chunks(pieces, self._teller), 1):
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

    def _pieces(self, response: httpx2.Response, call: Call) -> Iterator[tuple[float, bytes]]:
        """Yield the chunks of a body with their arrival times."""
        total = 0
        with self._translated(call):
            for data in response.iter_raw():
                arrived = time.perf_counter()
                total += len(data)
                if total > _MOST_BYTES:
                    raise self._teller.fault("answer is too long", f"more than {_MOST_BYTES:,} bytes")
                yield arrived, data
        self._check_call(call)  # If the connection is shut down, a body of unknown length ends without an error.

    def _read(self, response: httpx2.Response, call: Call, most: int) -> Iterator[bytes]:
        """Yield the first `most` bytes of a body that is not a stream."""
        total = 0
        for _, data in self._pieces(response, call):
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
        line: Line | None = None
        self._watch.add(call)
        try:
            with self._translated(call):
                line, response = self._send(method, self.endpoint.base + path, content, call, seen)
            with contextlib.closing(response):
                yield response
        finally:
            self._watch.remove(call)
            call.let_go()
            if line is not None:
                self._keep(line)

    def _send(
        self, method: str, url: str, content: bytes | None, call: Call, seen: str
    ) -> tuple[Line, httpx2.Response]:
        import httpx2

        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            line = line or self._new_line()
            kept = line.used
            try:
                return line, line.send(method, url, content, call, seen)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                line.close()
                if not kept or call.stopped or call.expired:
                    raise  # Otherwise, the server has closed this idle connection, so try another one.
            except BaseException:
                line.close()
                raise

    def _new_line(self) -> Line:
        return Line(self._headers, self._tls, through_proxy=not self.endpoint.is_loopback)

    def _keep(self, line: Line) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    # Errors

    def _check(self, response: httpx2.Response, call: Call) -> None:
        """Raise the error that matches the status of an unsuccessful response."""
        if response.is_success:
            return
        status = response.status_code
        if response.is_redirect:
            where = self._teller.shown(response.headers.get("location", "nowhere"))
            raise self._teller.fault(f"redirected (HTTP {status})", where, "if you trust that address, use it instead")
        body = b"".join(self._read(response, call, _MOST_ERROR))
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
        said, _ = _refusal(b"".join(self._read(response, call, _MOST_ERROR)))
        if said:
            raise self._teller.fault("the server reported an error", self._teller.shown(said))
        seen = f"content type {self._teller.shown(kind, 60)}, text/event-stream expected"
        raise self._teller.fault("answer is not an event stream", seen, _CHECK_API)

    def _check_call(self, call: Call) -> None:
        if call.stopped:
            raise Cancelled(f"request was stopped: {self.endpoint.host}")
        if call.expired:
            raise self._teller.fault("the server timed out", call.expired)

    @contextlib.contextmanager
    def _translated(self, call: Call) -> Iterator[None]:
        """Translate the errors of httpx2 and of the network into LlmrunError."""
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError, ImportError) as error:
            self._check_call(call)
            # Protocol errors may quote the server, and the server may quote the key, which --debug would then show.
            raise in_our_words(error, self._teller) from (error if self._teller.is_harmless(error) else None)

    def _default_model(self) -> str:
        models = self.models()
        if not models:
            raise ModelNotFound(
                f"model: {self.endpoint.host}: the server has no models", hint="load a model into the server"
            )
        found = default_model(models)
        if found is None:
            names = [str(model["id"]) for model in models]
            some = ", ".join(self._teller.shown(name, 40) for name in names[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UsageError(
                f"model: {self.endpoint.host}: the server has {len(names)} models: {some}{more}",
                hint=f"choose one: -m {self.endpoint.base}#{self._teller.shown(names[0], 80)}",
            )
        return str(found["id"])


def request_headers(key: str | None, origin: str = f"environment: {KEY_VARIABLE}") -> dict[str, str]:
    """Return the headers of all requests.

    Raises UsageError for a key with characters that are not allowed. `origin` says where the key comes from.
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
    """Return the TLS settings. Reading the certificates takes 15 ms, so it is skipped for plain HTTP to localhost."""
    import httpx2

    if endpoint.is_loopback and endpoint.base.startswith("http:"):
        import ssl

        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # This context trusts no certificates.
    return httpx2.create_ssl_context()


def _refusal(body: bytes) -> tuple[str, str]:
    """Return the message from an error body, and the code or type. Each is "" if missing."""
    try:
        table = json.loads(body)
        said = server_words(table)
    except (ValueError, RecursionError):  # The body is not JSON, for example an HTML page, or it is empty.
        return "", ""
    error = table.get("error") if isinstance(table, dict) else None
    codes = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return said, next((code for code in codes if isinstance(code, str)), "")
