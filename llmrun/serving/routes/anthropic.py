"""The routes of Anthropic's API: messages, and the counting of their tokens."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun.serving.bodies import off_the_loop
from llmrun.serving.exchanges import exchange_of
from llmrun.serving.protocol.anthropic.answers import MessageAnswer
from llmrun.serving.protocol.anthropic.requests import parse_count, parse_message
from llmrun.serving.protocol.anthropic.wire import ANTHROPIC
from llmrun.serving.refusals import ignored_header, json_response
from llmrun.serving.routes.generation import Call
from llmrun.serving.service import Service

MESSAGE = Call("msg_", parse_message, MessageAnswer, ANTHROPIC)


class CountRoute:
    """POST /v1/messages/count_tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Return the number of tokens of the prompt that /v1/messages would make of the same body."""
        body, large = await self._service.bodies.read_json(request.scope, request.receive)
        async with self._service.models.lease(body.get("model")) as lease:
            ready = await lease.ready()
            parsed = await off_the_loop(large, lambda: parse_count(body, ready.facts))
            asked = replace(ready.completed(parsed.requests[0]), tenant=exchange_of(request.scope).tenant)
            tokens = await ready.model.count_prompt(asked)
        return json_response({"input_tokens": tokens}, headers=ignored_header(parsed.ignored_header))
