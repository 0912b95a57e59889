"""llama-server's routes GET /props and GET /slots, and the refusal of saved slots."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun import __version__
from llmrun.serving.exchanges import Presence
from llmrun.serving.models.registry import Ready
from llmrun.serving.protocol.llama_facts import props_body, slots_body
from llmrun.serving.refusals import SERVER, Refused, json_response
from llmrun.serving.service import Service

_NO_LOADING: Final = "false"  # the value of `autoload` with which llama-server loads no model


class LlamaServerRoutes:
    """The routes GET /props and GET /slots. The query parameter `model` can name the model."""

    def __init__(self, service: Service) -> None:
        self._models = service.models

    async def props(self, request: HttpRequest) -> Response:
        """Describe a model. A model that is not loaded is loaded, unless the query parameter `autoload` is false."""
        found = await self._loaded(request)
        if found is None and request.query_params.get("autoload") == _NO_LOADING:
            raise _not_loaded()
        if found is None:
            lease = self._models.lease(request.query_params.get("model"))
            async with lease as leased, Presence(request.receive) as presence:
                found = await presence.during(leased.ready())
        return json_response(props_body(found.facts, __version__))

    async def slots(self, request: HttpRequest) -> Response:
        """List the slots for running requests, without the prompts, which belong to other clients."""
        found = await self._loaded(request)
        if found is None:
            raise _not_loaded()
        slots = slots_body(found.facts, found.model.load.running)
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in slots):
            raise Refused(503, "no slot available", kind=SERVER, code="busy")
        return json_response(slots)

    async def _loaded(self, request: HttpRequest) -> Ready | None:
        """Return the model if it is loaded. Programs ask often, so asking does not keep the model loaded."""
        known = await self._models.find(request.query_params.get("model"))
        process = self._models.process_of(known)
        return None if process is None or process.facts is None else Ready.under(known, process)


def _not_loaded() -> Refused:
    return Refused(503, "the model is not loaded; it is loaded when a request names it", kind=SERVER, code="unloaded")


async def no_saved_slots(request: HttpRequest) -> Response:
    """Refuse to save, restore or erase slots."""
    words = "slots cannot be saved over HTTP: start the server with --save-prefixes"
    raise Refused(501, words, kind=SERVER, code="not_supported")
