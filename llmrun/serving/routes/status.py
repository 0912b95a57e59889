"""The routes about the server itself: /health, /metrics and /openapi.json."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun import __version__
from llmrun.serving import metrics
from llmrun.serving.processes.served_model import State
from llmrun.serving.protocol.openapi import document
from llmrun.serving.refusals import json_response
from llmrun.serving.service import Service
from llmrun.serving.upstreams.gauges import upstream_lines

_NO_UPSTREAM = "no_upstream"


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
        service = self._service
        state = service.models.state(service.options.limits.stale_s)
        if service.upstreams is None or state == State.DRAINING:
            return state
        if service.upstreams.is_up:
            return State.READY
        return state if service.models.known.given else _NO_UPSTREAM

    async def metrics(self, request: HttpRequest) -> Response:
        processes = [(managed.known.name, managed.process) for managed in self._service.models.loaded()]
        loaded = [
            metrics.LoadedModel(name, process.facts.kv_tokens if process.facts else 0, process.state, process.load)
            for name, process in processes
            if process is not None
        ]
        text = self._service.metrics.text(__version__, loaded)
        if self._service.upstreams is not None:
            text += "\n".join(upstream_lines(self._service.upstreams.all)) + "\n"
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE, "cache-control": "no-store"})

    async def openapi(self, request: HttpRequest) -> Response:
        return json_response(document(__version__))
