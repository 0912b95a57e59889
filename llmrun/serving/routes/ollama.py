"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun import __version__
from llmrun.engine.requests import ModelFacts
from llmrun.serving.exchanges import exchange_of
from llmrun.serving.models.known import KnownModel, digest_of, glance_at, header_of
from llmrun.serving.models.registry import Models, Ready
from llmrun.serving.protocol.ollama.answers import (
    OLLAMA,
    UNLOADED,
    OllamaAnswer,
    OllamaModel,
    Write,
    abilities_of,
    empty_answer,
    listed_elsewhere,
    loaded_body,
    ollama_chat,
    ollama_text,
    parameter_label,
    show_body,
    tags_body,
    version_body,
)
from llmrun.serving.protocol.ollama.objects import OllamaChat, OllamaLoadedModels, OllamaText
from llmrun.serving.protocol.ollama.requests import (
    keep_alive_of,
    only_unloads_chat,
    only_unloads_generate,
    parse_generate,
    parse_ollama_chat,
    parse_show,
)
from llmrun.serving.protocol.openapi import MISSING
from llmrun.serving.refusals import Refused, ignored_header, json_response
from llmrun.serving.routes.generation import Call
from llmrun.serving.service import Service


async def _unloaded(
    write: Write, only_unloads: Callable[[Mapping[str, Any]], bool], models: Models, body: dict[str, Any]
) -> OllamaChat | OllamaText | None:
    """Unload a model and return the answer if a call only unloads the model; return None for other calls."""
    if not only_unloads(body):
        return None
    known = await models.unload(body.get("model"))
    return empty_answer(write, known.name, time.time(), UNLOADED)


OLLAMA_CHAT = Call(
    "",
    parse_ollama_chat,
    partial(OllamaAnswer, ollama_chat),
    OLLAMA,
    keep_alive_of,
    partial(_unloaded, ollama_chat, only_unloads_chat),
)
OLLAMA_GENERATE = Call(
    "",
    parse_generate,
    partial(OllamaAnswer, ollama_text),
    OLLAMA,
    keep_alive_of,
    partial(_unloaded, ollama_text, only_unloads_generate),
)


class OllamaModelRoutes:
    """The routes about models: /api/tags, /api/ps and /api/show."""

    def __init__(self, service: Service) -> None:
        self._service, self._models = service, service.models

    async def tags(self, request: HttpRequest) -> Response:
        known = await self._models.known.listed()
        found = await asyncio.to_thread(lambda: [self._listed(each) for each in known])
        if self._service.upstreams is not None:
            own = [{"id": model.name} for model in found]
            found += map(listed_elsewhere, self._service.upstreams.beside(own, request.headers)[len(own) :])
        return json_response(tags_body(found))

    async def ps(self, request: HttpRequest) -> Response:
        loaded = [(managed, managed.process.facts) for managed in self._models.loaded() if managed.process is not None]
        listed = await asyncio.to_thread(lambda: [self._listed(managed.known) for managed, _ in loaded])
        found: OllamaLoadedModels = {
            "models": [
                loaded_body(model, facts, managed.memory, time.time() + self._models.expires_in(managed))
                for model, (managed, facts) in zip(listed, loaded, strict=True)
                if facts is not None
            ]
        }
        return json_response(found)

    async def show(self, request: HttpRequest) -> Response:
        body, _ = await self._service.bodies.read_json(request.scope, request.receive)
        name, ignored = parse_show(body)
        known = await self._models.find(name)
        listed, header = await asyncio.to_thread(lambda: (self._listed(known), header_of(known)))
        facts = self._facts(known)
        abilities = abilities_of(
            header.values,
            sees_images=header.sees_images if facts is None else facts.sees_images,
            takes_tools=header.mentions_tools if facts is None else facts.takes_tools,
            thinks=header.mentions_thinking if facts is None else facts.thinks,
            fills=header.fills if facts is None else facts.fills,
        )
        shown = show_body(listed, header.values, header.template, abilities, facts)
        if known.preset is not None and known.preset.system:
            shown["system"] = known.preset.system
        return json_response(shown, headers=ignored_header(ignored))

    def _listed(self, known: KnownModel) -> OllamaModel:
        facts, glanced = self._facts(known), glance_at(known)
        info = None if facts is None else facts.info
        return OllamaModel(
            name=known.name,
            size=known.size,
            modified=known.modified,
            digest=digest_of(known),
            family=glanced.architecture if info is None else info.architecture,
            parameters=glanced.size_label if info is None else parameter_label(info.parameters),
            quantization=glanced.quantization if info is None else info.file_type,
            context=glanced.context if info is None else info.context_size,
        )

    def _facts(self, known: KnownModel) -> ModelFacts | None:
        process = self._models.process_of(known)
        return None if process is None or process.facts is None else Ready.under(known, process).facts


async def version(request: HttpRequest) -> Response:
    return json_response(version_body(__version__))


async def missing(request: HttpRequest) -> Response:
    """Refuse a call that this server does not support."""
    raise Refused(501, MISSING[exchange_of(request.scope).route], code="not_implemented")
