"""The routes of OpenAI's API: chat completions, completions and models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun.base.errors import ModelNotFound
from llmrun.serving.models.known import KnownModel
from llmrun.serving.models.ready import Ready
from llmrun.serving.protocol.anthropic.models import VERSION_HEADER, anthropic_model, anthropic_models
from llmrun.serving.protocol.openai.models import model_body, models_body, unloaded_model_body
from llmrun.serving.protocol.openai.requests import parse_chat, parse_completion
from llmrun.serving.protocol.openai.responses import ChatAnswer, CompletionAnswer
from llmrun.serving.refusals import json_response
from llmrun.serving.routes.generation import Call
from llmrun.serving.service import Service

CHAT = Call("chatcmpl-", parse_chat, ChatAnswer)
COMPLETION = Call("cmpl-", parse_completion, CompletionAnswer)


class ModelRoutes:
    """The list of models, including those of upstreams, in the form of OpenAI's or Anthropic's API."""

    def __init__(self, service: Service) -> None:
        self._models, self._upstreams = service.models, service.upstreams

    async def list_models(self, request: HttpRequest) -> Response:
        bodies = [self._body(known) for known in await self._models.known.listed()]
        if self._upstreams is not None:
            bodies = self._upstreams.beside(bodies, request.headers)
        body = models_body(bodies)
        return json_response(anthropic_models(body) if VERSION_HEADER in request.headers else body)

    async def show_model(self, request: HttpRequest) -> Response:
        body = await self._shown(request.path_params["id"], request)
        return json_response(anthropic_model(body) if VERSION_HEADER in request.headers else body)

    async def _shown(self, name: str, request: HttpRequest) -> dict[str, Any]:
        try:
            return self._body(await self._models.find(name))
        except ModelNotFound:
            if self._upstreams is None:
                raise
            return self._upstreams.model(name, request.headers)

    def _body(self, known: KnownModel) -> dict[str, Any]:
        process = self._models.process_of(known)
        if process is None or process.facts is None:
            body = unloaded_model_body(known.name, self._models.created)
        else:
            body = model_body(Ready.under(known, process).facts, self._models.created)
        return {**body, "parent": known.parent} if known.parent else body
