"""The routes of OpenAI's API: chat completions, completions and models."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmrun.engine.facts import ModelFacts
from llmrun.protocol.errors import InvalidField
from llmrun.protocol.openai.models import model_body, models_body
from llmrun.protocol.openai.requests import Parsed, parse_chat, parse_completion
from llmrun.protocol.openai.responses import ChatAnswer, CompletionAnswer
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.choices import Choices
from llmrun.serving.disconnects import Presence
from llmrun.serving.exchanges import exchange_of
from llmrun.serving.models import facts_of
from llmrun.serving.refusals import ignored_header, json_bytes_of_choices, json_response
from llmrun.serving.service import Service
from llmrun.serving.streams import StreamedAnswer, stream

_MANY_TOKENS = 256  # writing the log-probabilities of so many tokens takes 20 ms


class Answer(StreamedAnswer, Protocol):
    """An answer that can be streamed or sent as a whole."""

    def whole(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call of the API.

    prefix  of the ids of its answers
    parse   turns a body into requests to the engine
    answer  turns the engine's events into chunks or a body
    """

    prefix: str
    parse: Callable[[dict[str, Any], ModelFacts], Parsed]
    answer: Callable[[Parsed, ModelFacts, str, int], Answer]


CHAT = Call("chatcmpl", parse_chat, ChatAnswer)
COMPLETION = Call("cmpl", parse_completion, CompletionAnswer)


class Completions:
    """The ASGI endpoint of a call that generates text."""

    def __init__(self, service: Service, call: Call) -> None:
        self._service, self._call = service, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, call, exchange = self._service, self._call, exchange_of(scope)
        body, large = await service.bodies.read_json(scope, receive)
        model = service.models.find(body.get("model"))
        facts = facts_of(model)
        parsed = await off_the_loop(large, lambda: call.parse(body, facts))
        requests = [replace(request, tenant=exchange.tenant) for request in parsed.requests]
        if len(requests) > model.most_requests:
            raise InvalidField("n", f"{len(requests)} choices, but the queue has room for {model.most_requests}")
        answer = call.answer(parsed, facts, f"{call.prefix}-{exchange.id}", int(time.time()))
        headers = dict(ignored_header(parsed.ignored_header))
        async with Presence(receive) as presence, Choices(model, requests, service.metrics) as choices:
            try:
                await presence.during(choices.accepted())
                headers["x-llmrun-wait"] = f"{choices.wait_s:.3f}"
                if parsed.stream:
                    ping_s = service.options.limits.ping_s
                    if not await presence.during(stream(send, choices, answer, headers, ping_s)):
                        exchange.outcome = "failed"
                    return
                await presence.during(_collect(choices, answer))
            finally:
                exchange.tokens = f"{choices.prompt_tokens}+{choices.generated_tokens} tokens"
        large = choices.generated_tokens > _MANY_TOKENS
        whole = await off_the_loop(large, lambda: json_bytes_of_choices(answer.whole()))
        await json_response(whole, headers=headers)(scope, receive, send)


async def _collect(choices: Choices, answer: Answer) -> None:
    while (events := await choices.arrived()) is not None:
        for choice, event in events:
            answer.feed(choice, event)


class ModelRoutes:
    """The list of models."""

    def __init__(self, service: Service) -> None:
        self._models = service.models

    async def list_models(self, request: HttpRequest) -> Response:
        facts = facts_of(self._models.only)
        return json_response(models_body(facts, self._models.created))

    async def show_model(self, request: HttpRequest) -> Response:
        facts = facts_of(self._models.find(request.path_params["id"]))
        return json_response(model_body(facts, self._models.created))
