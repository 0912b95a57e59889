"""A worker that is a server with OpenAI's API, such as `llmrun serve` on another machine."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from llmrun.batching.workers.base import Reply, WorkerLost
from llmrun.errors import ModelNotFound, NetworkError, UsageError
from llmrun.protocol.errors import InvalidField
from llmrun.protocol.json_body import parse_json
from llmrun.remote.client import KEY_VARIABLE, request_headers, tls_settings
from llmrun.remote.connection import CONNECT_S, WRITE_S
from llmrun.remote.stream import Teller
from llmrun.remote.url import Endpoint

if TYPE_CHECKING:
    import httpx2

_BUSY: Final = (408, 425, 429, 502, 503, 504)  # the same request may succeed later
_OTHER_SERVER: Final = (401, 403, 404)  # after a restart, the server may have another model or other keys
_MOST_BYTES: Final = 256 << 20  # of one answer
_PATIENCE_S: Final = 600.0  # how long a server may be busy
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_PROBE_S: Final = 60.0  # a server that runs one request at a time may take as long to show that it is there


class _TooLarge(Exception):
    """An answer is larger than any answer can be."""


class EndpointWorker:
    """A server. It has no time limit for an answer, as long as it also answers other requests.

    Its key is in the environment, as for all models on servers.
    """

    def __init__(self, endpoint: Endpoint, *, slots: int, probe_s: float = _PROBE_S) -> None:
        """Create a worker without connecting. Raises UsageError for a key that cannot be sent.

        probe_s  how long the server may be silent until it is asked whether it is there, and how long it may then take
        """
        key = os.environ.get(KEY_VARIABLE) or None
        self.name = endpoint.address
        self.slots = slots
        self._endpoint = endpoint
        self._probe_s = probe_s
        self._headers = request_headers(key)
        self._teller = Teller(endpoint.host, key)
        self._client: httpx2.AsyncClient | None = None
        self._heard_at = 0.0
        self._fingerprint = ""  # of the model when the worker was opened; "" if the server does not tell

    async def start(self) -> Mapping[str, Any]:
        """See Worker. Raises NetworkError, ModelNotFound, and UsageError if the server has several models."""
        import httpx2

        await self.close()
        endpoint = self._endpoint
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            verify=tls_settings(endpoint),
            trust_env=not endpoint.is_loopback,
            follow_redirects=False,  # the key must not be sent to other hosts
            timeout=httpx2.Timeout(None, connect=CONNECT_S, write=WRITE_S, pool=None),
            limits=httpx2.Limits(max_connections=self.slots + 1, max_keepalive_connections=0),
        )
        try:
            card = self._chosen(await self._models())
        except WorkerLost as error:
            raise NetworkError(str(error), hint="check the address and that the server is running") from error
        except TimeoutError:
            raise NetworkError(f"{self.name}: no list of models within {self._probe_s:g} s") from None
        self._endpoint = Endpoint(endpoint.base, str(card["id"]), endpoint.host, endpoint.is_loopback)
        self._fingerprint = str(card.get("system_fingerprint") or "")
        return card

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        """See Worker. A busy server is asked again."""
        content = json.dumps({**body, "model": self._endpoint.model}).encode()
        busy_since, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                status, headers, data = await self._sent("POST", url.removeprefix("/v1"), content)
            except _TooLarge:
                return Reply(502, _error(f"{self.name}: the answer has more than {_MOST_BYTES:,} bytes"))
            if status in _OTHER_SERVER:
                raise WorkerLost(f"{self.name}: request rejected (HTTP {status})")
            if status not in _BUSY:
                return self._reply(status, headers, data)
            if time.monotonic() - busy_since > _PATIENCE_S:
                raise WorkerLost(f"{self.name}: busy for {_PATIENCE_S:.0f} s (HTTP {status})")
            await asyncio.sleep(_retry_after(headers, pause))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """See Worker."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _models(self) -> list[Mapping[str, Any]]:
        """Return the server's entries of /v1/models."""
        async with asyncio.timeout(self._probe_s):
            status, _, data = await self._request("GET", "/models", None)
        body = self._parsed(data)
        if status != 200:
            hint = f"set {KEY_VARIABLE} to your key" if status == 401 else ""
            words = self._teller.shown(json.dumps(body.get("error", "no reason given")), 160)
            raise NetworkError(f"{self.name}: request rejected: {words} (HTTP {status})", hint=hint)
        found = body.get("data")
        if not isinstance(found, list) or not all(isinstance(each, dict) and "id" in each for each in found):
            raise NetworkError(f"{self.name}: not a list of models", hint="check that the server has OpenAI's API")
        return found

    def _chosen(self, models: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        wanted = self._endpoint.model
        named = [each for each in models if each["id"] == wanted] if wanted else models
        if len(named) == 1:
            return named[0]
        if not named:
            what = f"no model {wanted}" if wanted else "no model"
            raise ModelNotFound(f"{self.name}: the server has {what}")
        names = self._teller.shown(", ".join(str(each["id"]) for each in named[:5]), 160)
        raise UsageError(f"{self.name}: the server has several models: {names}", hint=f"add #MODEL: {self.name}#MODEL")

    async def _sent(self, method: str, path: str, content: bytes | None) -> tuple[int, httpx2.Headers, bytes]:
        """Send a request, and wait for the response as long as the server shows that it is there."""
        task = asyncio.create_task(self._request(method, path, content))
        try:
            while not (await asyncio.wait((task,), timeout=self._probe_s))[0]:
                if time.monotonic() - self._heard_at < self._probe_s:
                    continue  # another response has just arrived
                try:
                    await self._models()
                except (TimeoutError, NetworkError) as error:
                    raise WorkerLost(f"{self.name}: no answer within {self._probe_s:g} s") from error
            return task.result()
        finally:
            task.cancel()

    async def _request(self, method: str, path: str, content: bytes | None) -> tuple[int, httpx2.Headers, bytes]:
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
                    if len(data) > _MOST_BYTES:
                        raise _TooLarge
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, RuntimeError) as error:
            words = self._teller.shown(str(error).strip().partition("\n")[0], 160) or type(error).__name__
            raise WorkerLost(f"{self.name}: {words}") from (error if self._teller.is_harmless(error) else None)
        self._heard_at = time.monotonic()
        return response.status_code, response.headers, bytes(data)

    def _reply(self, status: int, headers: httpx2.Headers, data: bytes) -> Reply:
        body = self._parsed(data)
        if status == 200 and body.get("system_fingerprint") != self._fingerprint and self._fingerprint:
            raise WorkerLost(f"{self.name}: the server was restarted with another model")
        if status == 200 and not isinstance(body.get("choices"), list):
            return Reply(502, _error(f"{self.name}: the response is not an answer"))
        if status != 200 and "error" not in body:
            body = _error(f"{self.name}: HTTP {status}")
        ignored = (name.strip() for name in headers.get("x-llmrun-ignored", "").split(","))
        return Reply(status, body, tuple(name for name in ignored if name))

    def _parsed(self, data: bytes) -> Mapping[str, Any]:
        try:
            return parse_json(data)
        except InvalidField as error:
            return _error(str(error).replace("the request body", "the response"))


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "bad_gateway"}}


def _retry_after(headers: httpx2.Headers, pause: float) -> float:
    """Return how long to wait: what the server says, if that is a sensible number of seconds."""
    try:
        said = float(headers.get("retry-after-ms", "")) / 1000
    except ValueError:
        try:
            said = float(headers.get("retry-after", ""))
        except ValueError:
            return pause
    return min(max(said, 0.05), _LONGEST_PAUSE_S) if said == said else pause
