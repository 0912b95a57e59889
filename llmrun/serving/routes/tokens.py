"""The routes that tokenize text, compute embeddings, rank documents and list LoRA adapters.

The class EmbeddingRoute serves the embedding and ranking routes of every API.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import structs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmrun.base.amounts import counted
from llmrun.engine.child.messages import Embed, Embedded
from llmrun.engine.requests import ModelFacts, Request
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.exchanges import Presence, exchange_of
from llmrun.serving.processes.served_model import ServedModel
from llmrun.serving.protocol.anthropic.requests import parse_count
from llmrun.serving.protocol.embeddings import (
    Parse,
    Write,
    embeddings_body,
    ollama_embed_body,
    ollama_embeddings_body,
    parse_embeddings,
    parse_ollama_embed,
    parse_ollama_embeddings,
    parse_rerank,
    rerank_body,
)
from llmrun.serving.protocol.llama_facts import RenderedPrompt
from llmrun.serving.protocol.ollama.requests import keep_alive_of
from llmrun.serving.protocol.openai.options import adapters_body
from llmrun.serving.protocol.openai.requests import parse_chat
from llmrun.serving.protocol.parsed import Parsed
from llmrun.serving.protocol.tokens import (
    check_pieces,
    detokenize_body,
    parse_detokenize,
    parse_tokenize,
    tokenize_body,
    tokenizer_info_body,
)
from llmrun.serving.refusals import context_header, ignored_header, json_bytes_in_parts, json_response
from llmrun.serving.service import Service

T = TypeVar("T")


class TokenRoutes:
    """The routes that tokenize text, count tokens, render chat templates and describe tokenizers and adapters."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: HttpRequest) -> Response:
        body, _ = await self._service.bodies.read_json(request.scope, request.receive)
        call, tenant = parse_tokenize(body), exchange_of(request.scope).tenant
        async with self._service.models.lease(body.get("model")) as lease, Presence(request.receive) as presence:
            ready = await presence.during(lease.ready())
            tokens = await presence.during(
                ready.model.tokenize(
                    call.text, add_special=call.add_special, parse_special=call.parse_special, tenant=tenant
                )
            )
            pieces = None
            if call.with_pieces:
                check_pieces(tokens)
                pieces = await presence.during(ready.model.spell(tokens, tenant=tenant))
        return json_response(tokenize_body(tokens, ready.facts, pieces), headers=ignored_header(call.ignored))

    async def detokenize(self, request: HttpRequest) -> Response:
        body, large = await self._service.bodies.read_json(request.scope, request.receive)
        tenant = exchange_of(request.scope).tenant
        async with self._service.models.lease(body.get("model")) as lease, Presence(request.receive) as presence:
            ready = await presence.during(lease.ready())
            tokens, ignored = await off_the_loop(large, lambda: parse_detokenize(body, ready.facts))
            text = await presence.during(ready.model.detokenize(tokens, tenant=tenant))
        return json_response(detokenize_body(text), headers=ignored_header(ignored))

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Return the number of prompt tokens that /v1/messages would compute for the same body."""
        tokens, ignored = await self._of_prompt(request, parse_count, lambda model, asked: model.count_prompt(asked))
        return json_response({"input_tokens": tokens}, headers=ignored_header(ignored))

    async def apply_template(self, request: HttpRequest) -> Response:
        """Return the text of the prompt that /v1/chat/completions would compute for the same body."""

        def parse(body: dict[str, Any], facts: ModelFacts) -> Parsed:
            return parse_chat(body, facts, seed=0)

        prompt, ignored = await self._of_prompt(request, parse, lambda model, asked: model.render_prompt(asked))
        return json_response(RenderedPrompt(prompt=prompt), headers=ignored_header(ignored))

    async def _of_prompt(
        self,
        request: HttpRequest,
        parse: Callable[[dict[str, Any], ModelFacts], Parsed],
        call: Callable[[ServedModel, Request], Coroutine[Any, Any, T]],
    ) -> tuple[T, Sequence[str]]:
        """Return the result of a call for the body's prompt, and the paths of the body's ignored fields."""
        body, large = await self._service.bodies.read_json(request.scope, request.receive)
        async with self._service.models.lease(body.get("model")) as lease, Presence(request.receive) as presence:
            ready = await presence.during(lease.ready())
            parsed = await off_the_loop(large, lambda: parse(body, ready.facts))
            asked = structs.replace(ready.completed(parsed.request), tenant=exchange_of(request.scope).tenant)
            return await presence.during(call(ready.model, asked)), parsed.ignored

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """Return what lm-evaluation-harness asks for. The query parameter `model` can name the model."""
        name = request.query_params.get("model")
        async with self._service.models.lease(name) as lease, Presence(request.receive) as presence:
            ready = await presence.during(lease.ready())
            return json_response(tokenizer_info_body(ready.facts))

    async def list_adapters(self, request: HttpRequest) -> Response:
        """Return the LoRA adapters in llama-server's form. The query parameter `model` can name the model."""
        name = request.query_params.get("model")
        async with self._service.models.lease(name) as lease, Presence(request.receive) as presence:
            ready = await presence.during(lease.ready())
            return json_response(adapters_body(ready.facts))


_MANY_BYTES: Final = 1 << 16  # vectors of this size take several milliseconds to write as JSON


@dataclass(frozen=True, slots=True)
class EmbeddingKind:
    """The functions that parse the body, write the answer and return the keep-alive seconds for one kind of call."""

    parse: Parse
    write: Write
    keep_s: Callable[[dict[str, Any]], float | None] = lambda body: None


EMBEDDINGS: Final = EmbeddingKind(parse_embeddings, embeddings_body)
RERANK: Final = EmbeddingKind(parse_rerank, rerank_body)
OLLAMA_EMBED: Final = EmbeddingKind(parse_ollama_embed, ollama_embed_body, keep_alive_of)
OLLAMA_EMBEDDINGS: Final = EmbeddingKind(parse_ollama_embeddings, ollama_embeddings_body, keep_alive_of)


class EmbeddingRoute:
    """The ASGI endpoint of one EmbeddingKind."""

    def __init__(self, service: Service, kind: EmbeddingKind) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, service, exchange = time.perf_counter(), self._service, exchange_of(scope)
        body, large = await service.bodies.read_json(scope, receive)
        keep_s = self._kind.keep_s(body)
        async with service.models.lease(body.get("model"), keep_s) as lease, Presence(receive) as presence:
            ready = await presence.during(lease.ready())
            call = await off_the_loop(large, partial(self._kind.parse, body, ready.facts, exchange.tenant))
            found = await presence.during(_embedded(ready.model, call.wanted))
        exchange.tokens = counted(sum(found.tokens), "token")
        seconds, name = time.perf_counter() - started, ready.facts.name
        whole = await off_the_loop(
            len(found.data) > _MANY_BYTES, lambda: json_bytes_in_parts(self._kind.write(call, found, name, seconds))
        )
        headers = {**ignored_header(call.ignored), **context_header(call.context)}
        await json_response(whole, headers=headers)(scope, receive, send)


async def _embedded(model: ServedModel, wanted: Embed) -> Embedded:
    """Return the results of a call. Calls without inputs only load the model."""
    return await model.embed(wanted) if wanted.inputs else Embedded(0, b"", ())
