"""A worker that is a server with an OpenAI-compatible API, such as `llmrun serve` on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.errors import LlmrunError, NetworkError
from llmrun.engine.remote.client import KEY_VARIABLE, async_client, chosen_model, request_headers
from llmrun.engine.remote.request import Endpoint
from llmrun.engine.remote.stream import Teller
from llmrun.jobs.batching.workers.base import RefusedWorker, Reply, WorkerLost
from llmrun.serving.protocol.errors import InvalidField, parse_json

if TYPE_CHECKING:
    import httpx2

_DENIED: Final = (401, 403)
_NOT_FOUND: Final = 404
_BUSY: Final = (408, 425, 429, 502, 503, 504)  # The same request may succeed later.
_MOST_BYTES: Final = 64 << 20  # The maximum size of one answer.
_MOST_MODELS: Final = 4 << 20  # The maximum size of a list of models in bytes.
_PATIENCE_S: Final = 600.0  # The maximum time for which a server may be busy.
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_PROBE_S: Final = 60.0  # a server that runs one request at a time may need this long to respond to a probe


class _TooLarge(Exception):
    """Raised when a response exceeds the size limit."""


class UnusableServer(RefusedWorker, NetworkError):
    """Raised when the server refuses all calls."""


class EndpointWorker:
    """A server. An answer has no time limit as long as the server also responds to other requests.

    The API key is read from the environment, as for all models on servers.
    """

    def __init__(
        self, endpoint: Endpoint, *, slots: int, note: Callable[[str], None], probe_s: float = _PROBE_S
    ) -> None:
        """Create a worker without connecting. Raises UsageError for an API key that cannot be sent in a header.

        note     called with a line for the user if the server is busy
        probe_s  how long a server may be silent before a probe is sent, and how long the probe may take
        """
        key = os.environ.get(KEY_VARIABLE) or None
        self.name = endpoint.address
        self.slots = slots
        self._endpoint = endpoint
        self._note = note
        self._probe_s = probe_s
        self._key = key
        self._is_busy = False
        self._headers = request_headers(key)
        self._teller = Teller(endpoint.host, key)
        self._client: httpx2.AsyncClient | None = None
        self._heard_at = 0.0
        self._fingerprint = ""  # the model's fingerprint when the worker was opened; "" if unknown

    async def start(self) -> Mapping[str, Any]:
        """Open the worker. Raises NetworkError, ModelNotFound, and UsageError if the server has several models."""
        await self.close()
        endpoint = self._endpoint
        self._client = async_client(endpoint, self._headers, most_open=self.slots + 1, most_idle=0)
        try:
            card = chosen_model(await self._models(), endpoint, self._teller)
        except WorkerLost as error:
            raise NetworkError(str(error), hint="check the address and that the server is running") from error
        except _TooLarge:
            raise NetworkError(f"{self.name}: the list of models has more than {_MOST_MODELS:,} bytes") from None
        except TimeoutError:
            raise NetworkError(f"{self.name}: the server did not list its models within {self._probe_s:g} s") from None
        self._endpoint = Endpoint(endpoint.base, str(card["id"]), endpoint.host, endpoint.is_loopback)
        self._fingerprint = str(card.get("system_fingerprint") or "")
        return card

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        """Answer a call, as `Worker.answer` specifies. Retry the call if the server is busy."""
        content = json.dumps({**body, "model": self._endpoint.model}).encode()
        busy_since, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                status, headers, data = await self._sent(url.removeprefix("/v1"), content)
            except _TooLarge:
                return Reply(502, _error(f"{self.name}: the answer has more than {_MOST_BYTES:,} bytes"))
            await self._check_status(status, headers)
            if status not in _BUSY:
                self._is_busy = False
                return self._reply(status, headers, data)
            if time.monotonic() - busy_since > _PATIENCE_S:
                raise WorkerLost(f"{self.name}: busy for {_PATIENCE_S:.0f} s (HTTP {status})")
            if not self._is_busy:
                self._is_busy = True
                self._note(f"{self.name}: busy (HTTP {status}), trying again")
            await asyncio.sleep(_retry_after(headers, pause))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _check_status(self, status: int, headers: httpx2.Headers) -> None:
        """Raise an error if the status concerns more than this call."""
        if status in _DENIED:
            raise UnusableServer(f"{self.name}: not authorized (HTTP {status})", hint=f"set {KEY_VARIABLE} to your key")
        if 300 <= status < 400:
            where = self._teller.shown(headers.get("location", "nowhere"))
            hint = "if you trust that address, use it instead"
            raise UnusableServer(f"{self.name}: redirected to {where} (HTTP {status})", hint=hint)
        if status == _NOT_FOUND:
            try:  # the server may have been restarted with another model
                chosen_model(await self._models(), self._endpoint, self._teller)
            except (TimeoutError, LlmrunError, _TooLarge) as error:
                raise WorkerLost(f"{self.name}: the server no longer has the model (HTTP {status})") from error

    async def close(self) -> None:
        """Close the connections to the server."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _models(self) -> list[Mapping[str, Any]]:
        """Return the server's entries of /v1/models."""
        async with asyncio.timeout(self._probe_s):
            status, headers, data = await self._request("GET", "/models", None, _MOST_MODELS)
        if status != _NOT_FOUND:
            await self._check_status(status, headers)
        body = self._parsed(data)
        if status != 200:
            hint = "check that the server has OpenAI's API"
            words = self._teller.shown(json.dumps(body.get("error", "no reason given")), 160)
            raise NetworkError(f"{self.name}: request rejected: {words} (HTTP {status})", hint=hint)
        found = body.get("data")
        if not isinstance(found, list) or not all(isinstance(each, dict) and "id" in each for each in found):
            raise NetworkError(
                f"{self.name}: /v1/models did not return a list of models",
                hint="check that the server has OpenAI's API",
            )
        return found

    async def _sent(self, path: str, content: bytes) -> tuple[int, httpx2.Headers, bytes]:
        """Post a call, and wait for the response as long as the server responds to probes."""
        task = asyncio.create_task(self._request("POST", path, content, _MOST_BYTES))
        try:
            while not (await asyncio.wait((task,), timeout=self._probe_s))[0]:
                if time.monotonic() - self._heard_at < self._probe_s:
                    continue  # another response has just arrived
                try:
                    await self._models()
                except (TimeoutError, NetworkError, _TooLarge) as error:
                    raise WorkerLost(f"{self.name}: no answer within {self._probe_s:g} s") from error
            return task.result()
        finally:
            task.cancel()

    async def _request(
        self, method: str, path: str, content: bytes | None, most_bytes: int
    ) -> tuple[int, httpx2.Headers, bytes]:
        import httpx2

        if self._client is None:
            raise WorkerLost(f"{self.name}: closed")
        headers = {} if content is None else {"content-type": "application/json"}
        data = bytearray()
        try:
            url = self._endpoint.base + path
            async with self._client.stream(method, url, content=content, headers=headers) as response:
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) > most_bytes:
                        raise _TooLarge
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, RuntimeError) as error:
            words = self._teller.shown(str(error).strip().partition("\n")[0], 160) or type(error).__name__
            raise WorkerLost(f"{self.name}: {words}") from (error if self._teller.is_harmless(error) else None)
        self._heard_at = time.monotonic()
        return response.status_code, response.headers, bytes(data)

    def _reply(self, status: int, headers: httpx2.Headers, data: bytes) -> Reply:
        body = self._parsed(data)
        fingerprint = body.get("system_fingerprint")
        if status == 200 and "choices" in body and self._fingerprint and fingerprint != self._fingerprint:
            raise WorkerLost(f"{self.name}: the server was restarted with another model")
        if status == 200 and not isinstance(body.get("choices"), list):
            return Reply(502, _error(f"{self.name}: the response has no choices"))
        if status != 200 and not isinstance(body.get("error"), dict):
            body = _error(f"{self.name}: HTTP {status}")
        ignored = (name.strip() for name in headers.get("x-llmrun-ignored", "").split(","))
        return Reply(status, body, tuple(name for name in ignored if name))

    def _parsed(self, data: bytes) -> Mapping[str, Any]:
        """Return the JSON object of a response, or an error object for an invalid response. The API key is redacted."""
        try:
            body = parse_json(data)
        except InvalidField as error:
            return _error(str(error).replace("the request body", "the response"))
        if self._key and self._key in (text := json.dumps(body, ensure_ascii=False)):
            body = json.loads(text.replace(self._key, "(the key)"))
        return body


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "bad_gateway"}}


def _retry_after(headers: httpx2.Headers, pause: float) -> float:
    """Return the seconds to wait: the server's value if that is sensible, otherwise `pause`."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError):
            said = float(headers.get(name, "")) * unit
            return pause if math.isnan(said) else min(max(said, 0.05), _LONGEST_PAUSE_S)
    return pause
