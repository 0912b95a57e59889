"""The routes that turn text into tokens and back."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun.protocol.errors import InvalidField
from llmrun.protocol.tokens import detokenize_body, parse_detokenize, parse_tokenize, tokenize_body
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.exchanges import exchange_of
from llmrun.serving.models import facts_of
from llmrun.serving.refusals import json_response
from llmrun.serving.service import Service

_MOST_PIECES = 10_000  # each takes a message to the engine's process and back


class TokenRoutes:
    """POST /tokenize and /detokenize."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: HttpRequest) -> Response:
        body, _ = await self._service.bodies.read_json(request.scope, request.receive)
        model = self._service.models.find(body.get("model"))
        call, facts = parse_tokenize(body), facts_of(model)
        tenant = exchange_of(request.scope).tenant
        tokens = await model.tokenize(
            call.text, add_special=call.add_special, parse_special=call.parse_special, tenant=tenant
        )
        if call.with_pieces and len(tokens) > _MOST_PIECES:
            raise InvalidField("with_pieces", f"the text has {len(tokens):,} tokens, the limit is {_MOST_PIECES:,}")
        pieces = [await model.detokenize([token], tenant=tenant) for token in tokens] if call.with_pieces else None
        return json_response(tokenize_body(tokens, facts, pieces))

    async def detokenize(self, request: HttpRequest) -> Response:
        body, large = await self._service.bodies.read_json(request.scope, request.receive)
        model = self._service.models.find(body.get("model"))
        facts = facts_of(model)
        tokens = await off_the_loop(large, lambda: parse_detokenize(body, facts))
        text = await model.detokenize(tokens, tenant=exchange_of(request.scope).tenant)
        return json_response(detokenize_body(text))
