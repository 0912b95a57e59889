"""The route that lists the LoRA adapters of a model."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun.serving.protocol.openai.adapters import adapters_body
from llmrun.serving.refusals import json_response
from llmrun.serving.service import Service


class AdapterRoutes:
    """GET /lora-adapters, as in llama-server. A query parameter can name the model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list_adapters(self, request: HttpRequest) -> Response:
        async with self._service.models.lease(request.query_params.get("model")) as lease:
            ready = await lease.ready()
            return json_response(adapters_body(ready.facts))
