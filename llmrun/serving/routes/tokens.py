"""The routes that turn text into tokens and back."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun.serving.bodies import off_the_loop
from llmrun.serving.exchanges import exchange_of
from llmrun.serving.processes.served_model import ServedModel
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.tokens import detokenize_body, parse_detokenize, parse_tokenize, tokenize_body
from llmrun.serving.refusals import json_response
from llmrun.serving.service import Service

_MOST_PIECES = 10_000  # each takes a message to the engine's process and back


class TokenRoutes:
    """POST /tokenize and /detokenize."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: HttpRequest) -> Response:
        body, _ = await self._service.bodies.read_json(request.scope, request.receive)
        call, tenant = parse_tokenize(body), exchange_of(request.scope).tenant
        async with self._service.models.lease(body.get("model")) as lease:
            ready = await lease.ready()
            tokens = await ready.model.tokenize(
                call.text, add_special=call.add_special, parse_special=call.parse_special, tenant=tenant
            )
            pieces = await _pieces(ready.model, tokens, tenant) if call.with_pieces else None
        return json_response(tokenize_body(tokens, ready.facts, pieces))

    async def detokenize(self, request: HttpRequest) -> Response:
        body, large = await self._service.bodies.read_json(request.scope, request.receive)
        async with self._service.models.lease(body.get("model")) as lease:
            ready = await lease.ready()
            tokens = await off_the_loop(large, lambda: parse_detokenize(body, ready.facts))
            text = await ready.model.detokenize(tokens, tenant=exchange_of(request.scope).tenant)
        return json_response(detokenize_body(text))


async def _pieces(model: ServedModel, tokens: list[int], tenant: str) -> list[bytes]:
    """Return the bytes of each token. Raises InvalidField if there are too many."""
    if len(tokens) > _MOST_PIECES:
        raise InvalidField("with_pieces", f"the text has {len(tokens):,} tokens, the limit is {_MOST_PIECES:,}")
    return [await model.detokenize([token], tenant=tenant) for token in tokens]
