"""The endpoint of every route that computes embeddings or ranks documents, whichever API it belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from llmrun.base.amounts import counted
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.disconnects import Presence
from llmrun.serving.exchanges import exchange_of
from llmrun.serving.protocol.embeddings.answers import (
    Write,
    embeddings_body,
    ollama_embed_body,
    ollama_embeddings_body,
    rerank_body,
)
from llmrun.serving.protocol.embeddings.calls import (
    Parse,
    parse_embeddings,
    parse_ollama_embed,
    parse_ollama_embeddings,
    parse_rerank,
)
from llmrun.serving.protocol.fields import Fields
from llmrun.serving.protocol.ollama.options import read_keep_alive
from llmrun.serving.protocol.parsed import ignored_names
from llmrun.serving.refusals import ignored_header, json_bytes_in_parts, json_response
from llmrun.serving.service import Service

_MANY_BYTES: Final = 1 << 16  # of vectors; writing so many as JSON takes several milliseconds


@dataclass(frozen=True, slots=True)
class EmbeddingKind:
    """One kind of call: how to read its body, how to write its answer, and how long the model then stays loaded."""

    parse: Parse
    write: Write
    keep_s: Callable[[dict[str, Any]], float | None] = lambda body: None


def _keep_alive(body: dict[str, Any]) -> float | None:
    return read_keep_alive(Fields(body))


EMBEDDINGS: Final = EmbeddingKind(parse_embeddings, embeddings_body)
RERANK: Final = EmbeddingKind(parse_rerank, rerank_body)
OLLAMA_EMBED: Final = EmbeddingKind(parse_ollama_embed, ollama_embed_body, _keep_alive)
OLLAMA_EMBEDDINGS: Final = EmbeddingKind(parse_ollama_embeddings, ollama_embeddings_body, _keep_alive)


class EmbeddingRoute:
    """The ASGI endpoint of one kind of call."""

    def __init__(self, service: Service, kind: EmbeddingKind) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, service, exchange = time.perf_counter(), self._service, exchange_of(scope)
        body, large = await service.bodies.read_json(scope, receive)
        keep_s = self._kind.keep_s(body)
        async with service.models.lease(body.get("model"), keep_s) as lease, Presence(receive) as presence:
            ready = await presence.during(lease.ready())
            call = await off_the_loop(large, partial(self._kind.parse, body, ready.facts, exchange.tenant))
            found = await presence.during(ready.model.embed(call.wanted))
        exchange.tokens = counted(sum(found.tokens), "token")
        seconds, name = time.perf_counter() - started, ready.facts.name
        whole = await off_the_loop(
            len(found.data) > _MANY_BYTES, lambda: json_bytes_in_parts(self._kind.write(call, found, name, seconds))
        )
        await json_response(whole, headers=ignored_header(ignored_names(call.ignored)))(scope, receive, send)
