"""Forwards requests for models that this server does not have to its upstreams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from llmrun.base.errors import ModelNotFound
from llmrun.serving.service import Service

if TYPE_CHECKING:
    from llmrun.serving.upstreams.front import Upstreams


class OrForwarded:
    """The ASGI endpoint of a route whose requests name a model. `own` answers those for models of this server."""

    def __init__(self, own: ASGIApp, service: Service, upstreams: Upstreams) -> None:
        self._own, self._service, self._upstreams = own, service, upstreams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, large = await self._service.bodies.read_json(scope, receive)
        name = "" if body.get("model") is None else body["model"]
        if not isinstance(name, str) or await self._is_own(name):
            await self._own(scope, receive, send)
        else:
            body["model"] = self._upstreams.name_of(name)
            with self._service.bodies.holding() as hold:
                await self._upstreams.forward(scope, receive, send, body, large=large, hold=hold)

    async def _is_own(self, name: str) -> bool:
        models = self._service.models
        if not name:
            return bool(models.known.given)
        try:
            await models.find(name)
        except ModelNotFound:
            return False
        return True
