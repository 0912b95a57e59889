"""The ASGI application: all routes behind the gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from llmrun.base.errors import LlmrunError, Overloaded
from llmrun.serving.exchanges import Exchanges, SecondChances, exchange_of
from llmrun.serving.gate import Gate
from llmrun.serving.protocol.embeddings import EMBEDDING_PATHS, OLLAMA_EMBED_PATH, OLLAMA_EMBEDDINGS_PATH, RERANK_PATHS
from llmrun.serving.protocol.openapi import MISSING, ROUTES
from llmrun.serving.refusals import Refused, error_response
from llmrun.serving.routes import ollama
from llmrun.serving.routes.generation import (
    CHAT,
    COMPLETION,
    INFILL,
    LLAMA_COMPLETION,
    MESSAGE,
    RESPONSE,
    Call,
    Generation,
    ModelRoutes,
    OrForwarded,
    no_stored_response,
)
from llmrun.serving.routes.llama_server import LlamaServerRoutes, no_saved_slots
from llmrun.serving.routes.status import StatusRoutes
from llmrun.serving.routes.tokens import (
    EMBEDDINGS,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    RERANK,
    EmbeddingRoute,
    TokenRoutes,
)
from llmrun.serving.service import Service


def make_app(
    service: Service,
    *,
    host_names: frozenset[str] = frozenset(),
    log: Callable[[str], None],
    trace: Callable[[str], None],
) -> ASGIApp:
    """Return the application.

    host_names  the host names of this machine, as in Gate
    log         called with a line for each request
    trace       called with the traceback of a bug
    """
    routes = _routes(service)
    if service.upstreams is not None:
        for route in routes:
            # POST requests name a model. Paths with parameters are chosen by clients and must not reach upstreams.
            if "POST" in (route.methods or ()) and not route.param_convertors:
                route.app = OrForwarded(route.app, service, service.upstreams)
    missing = [_Route(path, ollama.missing, methods=["HEAD", "POST", "DELETE"]) for path in MISSING]
    router = Router([*routes, *missing], redirect_slashes=False)
    # Starlette's own application class is not used, because its outermost layer would answer every other exception,
    # even ClientGone, before the exception reaches `Exchanges`.
    handlers = {HTTPException: _http_error, LlmrunError: _error, Overloaded: _reraise}
    inner = SecondChances(ExceptionMiddleware(router, handlers=handlers))
    return Exchanges(Gate(inner, service.options, host_names), service.metrics, log, trace)


class _Route(Route):
    """A route that records its path in the exchange, for the metrics."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange_of(scope).route = self.path
        await super().handle(scope, receive, send)


def _routes(service: Service) -> list[_Route]:
    generated: dict[str, Call[Any]] = {
        "/v1/chat/completions": CHAT,
        "/chat/completions": CHAT,  # llama-server's path, for clients that omit /v1
        "/v1/completions": COMPLETION,
        "/completions": COMPLETION,
        "/v1/responses": RESPONSE,
        "/responses": RESPONSE,
        "/v1/messages": MESSAGE,
        "/completion": LLAMA_COMPLETION,
        "/infill": INFILL,
        "/api/chat": ollama.OLLAMA_CHAT,
        "/api/generate": ollama.OLLAMA_GENERATE,
    }
    embedded = {
        **dict.fromkeys(EMBEDDING_PATHS, EMBEDDINGS),
        **dict.fromkeys(RERANK_PATHS, RERANK),
        OLLAMA_EMBED_PATH: OLLAMA_EMBED,
        OLLAMA_EMBEDDINGS_PATH: OLLAMA_EMBEDDINGS,
    }
    models, tokens, status = ModelRoutes(service), TokenRoutes(service), StatusRoutes(service)
    of_llama_server = LlamaServerRoutes(service)
    of_ollama = ollama.OllamaModelRoutes(service)
    return [
        *(_Route(path, Generation(service, call), methods=["POST"]) for path, call in generated.items()),
        *(_Route(path, EmbeddingRoute(service, kind), methods=["POST"]) for path, kind in embedded.items()),
        _Route("/v1/responses/{id}", no_stored_response, methods=["GET", "DELETE"]),
        _Route("/v1/responses/{id}/cancel", no_stored_response, methods=["POST"]),
        _Route("/v1/responses/{id}/input_items", no_stored_response),
        _Route("/v1/messages/count_tokens", tokens.count_tokens, methods=["POST"]),
        _Route("/v1/models", models.list_models),
        _Route("/v1/models/{id:path}", models.show_model),
        _Route("/models", models.list_models),
        _Route("/props", of_llama_server.props),
        _Route("/slots", of_llama_server.slots),
        _Route("/slots/{id}", no_saved_slots, methods=["POST"]),
        _Route("/apply-template", tokens.apply_template, methods=["POST"]),
        _Route("/tokenize", tokens.tokenize, methods=["POST"]),
        _Route("/detokenize", tokens.detokenize, methods=["POST"]),
        _Route("/tokenizer_info", tokens.tokenizer_info),
        _Route("/lora-adapters", tokens.list_adapters),
        _Route("/", status.page),
        _Route("/health", status.health),
        _Route("/v1/health", status.health),
        _Route("/metrics", status.metrics),
        _Route("/openapi.json", status.openapi),
        _Route("/api/tags", of_ollama.tags),
        _Route("/api/ps", of_ollama.ps),
        _Route("/api/show", of_ollama.show, methods=["POST"]),
        _Route("/api/version", ollama.version),
    ]


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Convert Starlette's errors (404 and 405) to the wire format of the API."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 404:
        words = f"no such path: {path!r}; {_suggestion(path)}see GET /openapi.json"
        return await _error(request, Refused(404, words, code="not_found"))
    words = f"{request.method} is not allowed for {path!r}"
    return await _error(request, Refused(error.status_code, words, code="method_not_allowed", headers=error.headers))


def _suggestion(path: str) -> str:
    """Return a suggestion for an unknown path, or "" if no route has a similar path.

    Most unknown paths come from a base URL with a wrong ending, such as /v1 for the API of Ollama or Anthropic.
    """
    known = {route.path for route in ROUTES} | {"/v1/models"}
    endings = [path[start:] for start, letter in enumerate(path) if letter == "/"]
    found = [meant for ending in endings for meant in (ending, f"/v1{ending}") if meant in known]
    return f"use {found[0]}, and check the base URL; " if found else ""


async def _reraise(request: HttpRequest, error: Exception) -> Response:
    """Raise the error again, for `SecondChances`."""
    raise error


async def _error(request: HttpRequest, error: Exception) -> Response:
    return error_response(error, exchange_of(request.scope).wire)
