"""The interface between a server's routes and its upstreams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from llmrun.base.errors import ModelNotFound, Unavailable
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.exchanges import Presence, exchange_of
from llmrun.serving.models.known import spellings
from llmrun.serving.processes.served_model import State
from llmrun.serving.protocol.embeddings import EMBEDDING_PATHS, OLLAMA_EMBED_PATH, OLLAMA_EMBEDDINGS_PATH, RERANK_PATHS
from llmrun.serving.protocol.wire import WireFormat, json_bytes
from llmrun.serving.streams import HEADER as LAST_EVENT
from llmrun.serving.streams import read_last_event
from llmrun.serving.upstreams.forwarding import WHOLE, Forwarding, Reply, no_upstream
from llmrun.serving.upstreams.pool import PACE, Hops, Pace, Pool, prefix_hashes
from llmrun.serving.upstreams.upstream import Upstream

_NEVER_STREAMED: Final = frozenset(
    {
        "/apply-template",
        "/tokenize",
        "/detokenize",
        *EMBEDDING_PATHS,
        *RERANK_PATHS,
        OLLAMA_EMBED_PATH,
        OLLAMA_EMBEDDINGS_PATH,
    }
)
_STREAMED_BY_DEFAULT: Final = "/api/"


class Upstreams:
    """All upstreams of a server.

    note  called with a message for the user when an upstream goes up or down
    """

    def __init__(
        self, upstreams: Sequence[Upstream], ping_s: float, note: Callable[[str], None], pace: Pace = PACE
    ) -> None:
        self._hops, self._ping_s = Hops(), ping_s
        self._pool = Pool(upstreams, self._hops, note, pace)
        self._running: set[asyncio.Task[None]] = set()
        self._draining = False

    async def start(self) -> None:
        """Request all upstreams' model lists now and at regular intervals. Upstreams that are down cause no error."""
        await self._pool.start()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running requests finish, and end all requests that still run after `seconds`."""
        self._draining = True
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        self._pool.stop()

    async def close(self) -> None:
        """End all requests with an error, and close all connections. Idempotent."""
        await self._pool.close()

    @property
    def all(self) -> Sequence[Upstream]:
        return self._pool.upstreams

    @property
    def open_requests(self) -> int:
        """The number of requests that are being forwarded."""
        return len(self._running)

    @property
    def is_up(self) -> bool:
        """True if at least one upstream is up and has a model.

        Upstreams without models are not counted, or else two servers forwarding to each other would stay up forever.
        """
        return any(upstream.models for upstream in self.all)

    def name_of(self, name: str) -> str:
        """Return the full name of the model that a request names, if a running upstream has the model.

        For other names, return the name itself if an upstream is down, because that upstream may have the model.
        Raises ModelNotFound if all upstreams are up, or if a request names no model and the choice is ambiguous.
        """
        names = dict.fromkeys(each for upstream in self.all for each in upstream.models)
        if name in names:
            return name
        full = {each.lower(): each for each in names}
        found = [full[spelling] for spelling in spellings(name) if spelling in full]
        if found:
            return found[0]
        if not name and len(names) == 1:
            return next(iter(names))
        if name and not all(upstream.is_up for upstream in self.all):
            return name
        if name:
            words = f"no such model: {name[:100]!r}"
            raise ModelNotFound(words, hint="neither this server nor its upstreams have this model; see /v1/models")
        raise ModelNotFound("the request names no model", hint="set the field model; see /v1/models")

    def beside(self, own: Sequence[Mapping[str, Any]], headers: Headers) -> list[dict[str, Any]]:
        """Return this server's models, followed by the upstreams' models that have other names.

        headers  the headers of the request for the list
        """
        found = {str(model["id"]): model for model in own}
        for upstream in self.all:
            found |= {name: model for name, model in upstream.models.items() if name not in found}
        return [self._hops.shown_to(headers, model) for model in found.values()]

    def model(self, name: str, headers: Headers) -> dict[str, Any]:
        """Return a model of an upstream. Raises ModelNotFound, and Refused if no running upstream has the model."""
        full = self.name_of(name)
        for upstream in self._pool.having(full):
            return self._hops.shown_to(headers, upstream.models[full])
        raise no_upstream(full)

    async def forward(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: Mapping[str, Any],
        *,
        large: bool,
        hold: Callable[[int], None],
    ) -> None:
        """Forward a request to an upstream, and pass on the upstream's answer.

        body   the request's body, which names a model
        large  True if the body is large and should be encoded in a thread
        hold   called with the number of bytes that stay in memory until the answer ends; raises Refused if this
               number is too large

        Raises Refused if no upstream answers, Unavailable if the server is shutting down, and ClientGone.
        """
        if self._draining:
            raise Unavailable("the server is shutting down", state=State.DRAINING.value)
        exchange, headers = exchange_of(scope), Headers(scope=scope)
        read_last_event(headers)  # raises Refused for an invalid ID, because the ID is sent to upstreams
        # No other headers are sent, because they may contain the client's secrets.
        fields = {"content-type": WHOLE, "via": self._hops.via(headers)}
        content, hashes = await off_the_loop(large, partial(_written, body))
        hold(len(content))
        streamed = _wants_stream(scope["path"], body)
        reply = Reply(send, exchange.wire, streamed=streamed)
        forwarding = Forwarding(
            self._pool,
            reply,
            exchange,
            path=scope["path"],
            model=str(body["model"]),
            content=content,
            headers=fields,
            expected=_kind(exchange.wire) if streamed else WHOLE,
            hashes=hashes,
            choices=_choices(body),
            last_id=headers.get(LAST_EVENT, ""),
        )
        async with Presence(receive) as presence, reply.pinging(self._ping_s):
            await presence.during(self._run(forwarding))

    async def _run(self, forwarding: Forwarding) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await forwarding.run()
        finally:
            self._running.discard(task)


def _written(body: Mapping[str, Any]) -> tuple[bytes, list[bytes]]:
    return json_bytes(body), prefix_hashes(body)


def _wants_stream(path: str, body: Mapping[str, Any]) -> bool:
    if path in _NEVER_STREAMED:
        return False
    wanted = body.get("stream")
    return path.startswith(_STREAMED_BY_DEFAULT) if wanted is None else wanted is True


def _choices(body: Mapping[str, Any]) -> int:
    """Return the number of answers that a request asks for: `n` per prompt. A list with a number is one prompt."""
    prompt, n = body.get("prompt"), body.get("n", body.get("n_cmpl"))
    are_several = isinstance(prompt, list) and prompt and not any(type(one) is int for one in prompt)
    prompts = prompt if isinstance(prompt, list) and are_several else [prompt]
    return len(prompts) * (n if type(n) is int else 1)


def _kind(wire: WireFormat) -> str:
    return wire.media_type.partition(";")[0]
