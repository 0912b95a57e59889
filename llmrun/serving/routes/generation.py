"""The endpoint of every route that generates text, whichever API it belongs to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from llmrun.engine.facts import ModelFacts
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.choices import Choices
from llmrun.serving.disconnects import Presence
from llmrun.serving.exchanges import AnswerId, exchange_of
from llmrun.serving.models.ready import Ready
from llmrun.serving.models.registry import Models
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.openai.sampling import seed_from
from llmrun.serving.protocol.parsed import Answer, Parsed
from llmrun.serving.protocol.wire import OPENAI, WireFormat
from llmrun.serving.refusals import Refused, ignored_header, json_bytes_in_parts, json_response
from llmrun.serving.resuming import EventNumbers, LastEvent, numbers_of, read_last_event
from llmrun.serving.service import Service
from llmrun.serving.streams import Stream

P = TypeVar("P", bound=Parsed)


@dataclass(frozen=True, slots=True)
class Call(Generic[P]):
    """One kind of call that generates text.

    prefix   the beginning of the ids of its answers
    parse    turns a body into requests to the engine; the last argument is the seed of a call that sets none
    answer   returns the object that turns the engine's events into chunks or a body, from the parsed call, the model's
             facts, the answer's ID, and the Unix time in seconds
    keep_s   returns for how many seconds the model stays loaded after a call, or None for the server's own setting
    instead  returns the body of the answer to a call that needs no loaded model, or None for other calls
    """

    prefix: str
    parse: Callable[[dict[str, Any], ModelFacts, int], P]
    answer: Callable[[P, ModelFacts, str, int], Answer]
    wire: WireFormat = OPENAI
    keep_s: Callable[[dict[str, Any]], float | None] = lambda body: None
    instead: Callable[[Models, dict[str, Any]], Awaitable[Mapping[str, Any] | None]] | None = None


class Generation(Generic[P]):
    """The ASGI endpoint of a call that generates text."""

    def __init__(self, service: Service, call: Call[P]) -> None:
        self._service, self._call = service, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        last = read_last_event(Headers(scope=scope))
        body, large = await service.bodies.read_json(scope, receive)
        if self._call.instead is not None and (given := await self._call.instead(service.models, body)) is not None:
            await json_response(given)(scope, receive, send)
            return
        keep_s = self._call.keep_s(body)
        async with service.models.lease(body.get("model"), keep_s) as lease, Presence(receive) as presence:
            ready = await presence.during(lease.ready())
            answer_id = exchange_of(scope).id if last is None else last.answer
            parsed, numbers = await off_the_loop(large, partial(self._read, body, ready, answer_id, last))
            name = f"{self._call.prefix}{answer_id}"
            answer = self._call.answer(parsed, ready.facts, name, answer_id.created)
            requests = [
                replace(ready.completed(request), tenant=exchange_of(scope).tenant) for request in parsed.requests
            ]
            if len(requests) > (most := ready.model.most_requests):
                raise InvalidField("n", f"{len(requests)} choices, but the queue has room for {most}")
            async with Choices(ready.model, requests, service.metrics) as choices:
                try:
                    await presence.during(choices.accepted())
                    headers = {**ignored_header(parsed.ignored_header), "x-llmrun-wait": f"{choices.wait_s:.3f}"}
                    if not parsed.stream:
                        await presence.during(_collect(choices, answer))
                    else:
                        stream = Stream(self._call.wire, numbers, headers, large, service.options.limits.ping_s)
                        if not await presence.during(stream.send(send, choices, answer)):
                            exchange_of(scope).outcome = "failed"
                        return
                finally:
                    exchange_of(scope).tokens = f"{choices.prompt_tokens}+{choices.generated_tokens} tokens"
        whole = await _written(answer, large or choices.is_long)
        await json_response(whole, headers=headers)(scope, receive, send)

    def _read(
        self, body: dict[str, Any], ready: Ready, answer_id: AnswerId, last: LastEvent | None
    ) -> tuple[P, EventNumbers]:
        parsed = self._call.parse(body, ready.facts, ready.seed(seed_from(answer_id)))
        if last is not None and not parsed.stream:
            raise Refused(400, "Last-Event-ID: only streams can be resumed", code="invalid_event_id")
        return parsed, numbers_of(answer_id, last, self._call.prefix, body, ready, len(parsed.requests))


async def _collect(choices: Choices, answer: Answer) -> None:
    while (events := await choices.arrived()) is not None:
        for choice, event in events:
            answer.feed(choice, event)


async def _written(answer: Answer, is_long: bool) -> bytes:
    def write() -> bytes:
        return json_bytes_in_parts(answer.whole())

    return await off_the_loop(is_long, write)
