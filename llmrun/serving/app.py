"""The ASGI application: all routes behind the gate."""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from llmrun.errors import LlmrunError
from llmrun.serving.exchanges import Exchanges, exchange_of
from llmrun.serving.gate import Gate
from llmrun.serving.refusals import Refused, error_response
from llmrun.serving.routes.openai import CHAT, COMPLETION, Completions, ModelRoutes
from llmrun.serving.routes.status import StatusRoutes
from llmrun.serving.routes.tokens import TokenRoutes
from llmrun.serving.service import Service


def make_app(
    service: Service,
    *,
    host_names: frozenset[str] = frozenset(),
    log: Callable[[str], None],
    trace: Callable[[str], None],
) -> ASGIApp:
    """Return the application.

    host_names  the names under which this machine is known, see Gate
    log         called with a line for each request
    trace       called with the traceback of a bug
    """
    router = Router(_routes(service), redirect_slashes=False)
    # Not Starlette's own application class, whose outermost layer would answer every other exception, even that a
    # client has left, before `Exchanges` sees it.
    inner = ExceptionMiddleware(router, handlers={HTTPException: _http_error, LlmrunError: _error})
    return Exchanges(Gate(inner, service.options, host_names), service.metrics, log, trace)


class _Route(Route):
    """A route that names itself to the metrics."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange_of(scope).route = self.path
        await super().handle(scope, receive, send)


def _routes(service: Service) -> list[_Route]:
    chat, completion = Completions(service, CHAT), Completions(service, COMPLETION)
    models, tokens, status = ModelRoutes(service), TokenRoutes(service), StatusRoutes(service)
    return [
        _Route("/v1/chat/completions", chat, methods=["POST"]),
        _Route("/chat/completions", chat, methods=["POST"]),  # as in llama-server, for clients without /v1
        _Route("/v1/completions", completion, methods=["POST"]),
        _Route("/completions", completion, methods=["POST"]),
        _Route("/v1/models", models.list_models),
        _Route("/v1/models/", models.list_models),  # otherwise, the next line would take it for a model without a name
        _Route("/v1/models/{id:path}", models.show_model),
        _Route("/models", models.list_models),
        _Route("/tokenize", tokens.tokenize, methods=["POST"]),
        _Route("/detokenize", tokens.detokenize, methods=["POST"]),
        _Route("/health", status.health),
        _Route("/metrics", status.metrics),
        _Route("/openapi.json", status.openapi),
    ]


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Turn Starlette's errors, which are 404 and 405, into the form of the API."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 404:
        return error_response(Refused(404, f"no such path: {path!r}; see GET /openapi.json", code="not_found"))
    words = f"{request.method} is not allowed for {path!r}"
    return error_response(Refused(error.status_code, words, code="method_not_allowed", headers=error.headers))


async def _error(request: HttpRequest, error: Exception) -> Response:
    return error_response(error)
