"""The routes that turn text into tokens and back, with the fields of llama-server or vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun.serving.models import facts_of
from llmrun.serving.openai_routes import ignored_header
from llmrun.serving.refusals import Refused, json_response
from llmrun.serving.service import Service


class TokenRoutes:
    """POST /tokenize and /detokenize."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: HttpRequest) -> Response:
        """Return the tokens of `content` (vLLM: `prompt`)."""
        self._service.check_running()
        body, _ = await self._service.bodies.read_json(request.scope, request.receive)
        model = self._service.models.find(body.get("model"))
        text = _field(body, ("content", "prompt"), str, None)
        add_special = _field(body, ("add_special", "add_special_tokens"), bool, False)
        parse_special = _field(body, ("parse_special",), bool, True)
        facts = facts_of(model)
        tokens = await model.tokenize(text, add_special=add_special, parse_special=parse_special)
        told = {"tokens": tokens, "count": len(tokens), "max_model_len": facts.info.context_size}
        known = {"model", "content", "prompt", "add_special", "add_special_tokens", "parse_special"}
        return json_response(told, headers=ignored_header(sorted(body.keys() - known)))

    async def detokenize(self, request: HttpRequest) -> Response:
        """Return the text of `tokens`. Bytes that are not UTF-8 become replacement characters."""
        self._service.check_running()
        body, _ = await self._service.bodies.read_json(request.scope, request.receive)
        model = self._service.models.find(body.get("model"))
        tokens = _field(body, ("tokens",), list, None)
        if not all(type(token) is int for token in tokens):
            raise Refused(400, "tokens: must be a list of integers", param="tokens")
        text = (await model.detokenize(tokens)).decode("utf-8", "replace")
        known = {"model", "tokens"}
        return json_response({"content": text, "prompt": text}, headers=ignored_header(sorted(body.keys() - known)))


def _field(body: Mapping[str, Any], names: tuple[str, ...], kind: type, default: Any) -> Any:
    """Return the value of the first of these fields that is present. Without a default, one is required."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None and default is not None:
        return default
    if name is None:
        raise Refused(400, f"{names[0]}: is required", code="missing_required_parameter", param=names[0])
    if type(body[name]) is not kind:
        words = {str: "a string", bool: "true or false", list: "a list"}[kind]
        raise Refused(400, f"{name}: must be {words}", code="invalid_type", param=name)
    return body[name]
