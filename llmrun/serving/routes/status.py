"""The routes about the server itself: /health, /metrics and /openapi.json."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun import __version__
from llmrun.engine_process.served_model import State
from llmrun.protocol.openai.openapi import document
from llmrun.serving import metrics
from llmrun.serving.refusals import json_response
from llmrun.serving.service import Service

_STUCK = "stuck"


class StatusRoutes:
    """GET /health, /metrics and /openapi.json."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: HttpRequest) -> Response:
        """Return 200 only if the server takes requests and the engine's heartbeat is recent.

        The response needs no key, so it says nothing but the state.
        """
        state = self._state()
        if state == State.READY:
            return json_response({"status": "ok"})
        return json_response({"status": state}, status=503, headers={"retry-after": "5"})

    def _state(self) -> str:
        model = self._service.models.only
        if model.state is State.READY and model.load.beat_age_s > self._service.options.limits.stale_s:
            return _STUCK
        return model.state

    async def metrics(self, request: HttpRequest) -> Response:
        model = self._service.models.only
        kv_tokens = model.facts.kv_tokens if model.facts else 0
        text = self._service.metrics.text(__version__, self._service.models.name, kv_tokens, model.state, model.load)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE, "cache-control": "no-store"})

    async def openapi(self, request: HttpRequest) -> Response:
        return json_response(document(__version__))
