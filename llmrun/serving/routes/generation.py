"""The routes that generate text, for every API, and the lists of models.

Requests for models that this server does not have are forwarded to upstreams. The server stores no responses of the
Responses API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import structs
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llmrun.base.amounts import counted
from llmrun.base.errors import ModelNotFound, shown
from llmrun.engine.requests import ChatPrompt, ModelFacts, Request, TextPrompt
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.exchanges import AnswerId, Presence, exchange_of
from llmrun.serving.models.known import KnownModel
from llmrun.serving.models.registry import Models, Ready
from llmrun.serving.prefix_log import reused_words
from llmrun.serving.protocol.anthropic.answers import (
    ANTHROPIC,
    VERSION_HEADER,
    MessageAnswer,
    anthropic_model,
    anthropic_models,
)
from llmrun.serving.protocol.anthropic.requests import parse_message
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.llama_server import LlamaServerAnswer, parse_infill, parse_llama_completion
from llmrun.serving.protocol.openai.objects import Model
from llmrun.serving.protocol.openai.options import seed_from
from llmrun.serving.protocol.openai.requests import parse_chat, parse_completion
from llmrun.serving.protocol.openai.responses import (
    ChatAnswer,
    CompletionAnswer,
    model_body,
    models_body,
    unloaded_model_body,
)
from llmrun.serving.protocol.openai_responses.answers import PREFIX, RESPONSES, ResponseAnswer
from llmrun.serving.protocol.openai_responses.requests import parse_response
from llmrun.serving.protocol.parsed import ApiAnswer, Parsed, left_out_tools
from llmrun.serving.protocol.wire import LLAMA_SERVER, OPENAI, WireFormat
from llmrun.serving.refusals import (
    Refused,
    context_header,
    ignored_header,
    image_words,
    images_header,
    json_bytes_in_parts,
    json_response,
)
from llmrun.serving.service import Service
from llmrun.serving.streams import Choices, EventNumbers, LastEvent, Stream, numbers_of, read_last_event

if TYPE_CHECKING:
    from llmrun.serving.upstreams.front import Upstreams


class OrForwarded:
    """The ASGI endpoint of a route whose requests name a model. `own` answers requests for this server's models."""

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


P = TypeVar("P", bound=Parsed)


@dataclass(frozen=True, slots=True)
class Call(Generic[P]):
    """One kind of call that generates text.

    prefix   the beginning of the answers' IDs
    parse    parses a body into requests to the engine; the last argument is the default seed
    answer   takes the parsed call, the model's facts, the answer's ID and the Unix time in seconds, and returns an
             object that converts the engine's events into chunks or a body
    keep_s   returns the seconds that the model stays loaded after a call, or None for the server's own setting
    instead  returns the response body of a call that needs no loaded model, or None for other calls
    """

    prefix: str
    parse: Callable[[dict[str, Any], ModelFacts, int], P]
    answer: Callable[[P, ModelFacts, str, int], ApiAnswer]
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
            exchange_of(scope).left_out = left_out_tools(parsed.ignored)
            name = f"{self._call.prefix}{answer_id}"
            answer = self._call.answer(parsed, ready.facts, name, answer_id.created)
            requests = [
                structs.replace(ready.completed(request), tenant=exchange_of(scope).tenant)
                for request in parsed.requests
            ]
            if len(requests) > (most := ready.model.most_requests):
                raise InvalidField("n", f"{len(requests)} choices, but the queue has room for {most}")
            if len(requests) > 1 and (size := sum(map(_image_bytes, requests))) > (most := ready.model.most_bytes):
                words = (
                    f"the images of {len(requests)} choices have {size:,} bytes, but the queue has room for {most:,}"
                )
                raise InvalidField("n", words, hint="ask for fewer choices, or send smaller images")
            async with Choices(ready.model, requests, service.metrics) as choices:
                try:
                    await presence.during(choices.accepted())
                    told = {
                        **ignored_header(parsed.ignored),
                        **context_header(parsed.context),
                        **images_header(choices.images),
                    }
                    headers = {**told, "x-llmrun-wait": f"{choices.wait_s:.3f}", **self._prefix_header(choices)}
                    if choices.first_token_s is not None:
                        headers["x-llmrun-first-token"] = f"{choices.first_token_s:.3f}"
                    if parsed.stream and choices.images:
                        await presence.during(choices.begun())
                    if not parsed.stream:
                        await presence.during(_collect(choices, answer))
                        headers.update(self._prefix_header(choices))
                    else:
                        ping_s, wire = service.options.limits.ping_s, self._call.wire
                        client = Headers(scope=scope).get("user-agent", "")
                        stream = Stream(wire, numbers, headers, large, ping_s, client, parsed.returns_progress)
                        if not await presence.during(stream.send(send, choices, answer)):
                            exchange_of(scope).outcome = "failed"
                        return
                finally:
                    exchange_of(scope).tokens = f"{choices.prompt_tokens}+{choices.generated_tokens} tokens"
                    exchange_of(scope).images = _images_and_encoding(choices)
                    if choices.problem:
                        exchange_of(scope).outcome = f"failed: {shown(choices.problem, 300)}"
                    self._record_prefix(choices, ready.facts.name, scope)
        whole = await _written(answer, large or choices.is_long)
        await json_response(whole, headers=headers)(scope, receive, send)

    def _prefix_header(self, choices: Choices) -> Mapping[str, str]:
        """Return the header that says how much of the prompt is reused. In streams, this is a prediction."""
        if choices.prefix is None:
            return {}
        return {"x-llmrun-prefix": reused_words(self._service.prefixes.completed(choices.prefix), for_client=True)}

    def _record_prefix(self, choices: Choices, model: str, scope: Scope) -> None:
        if choices.prefix is None:
            return
        prefixes, metrics = self._service.prefixes, self._service.metrics
        report = prefixes.completed(choices.prefix)
        exchange_of(scope).prefix = reused_words(report)
        metrics.count_prefix(model, report)
        prefixes.add(model, Headers(scope=scope).get("user-agent", ""), choices.prefill_s, report)

    def _read(
        self, body: dict[str, Any], ready: Ready, answer_id: AnswerId, last: LastEvent | None
    ) -> tuple[P, EventNumbers]:
        parsed = self._call.parse(body, ready.facts, ready.seed(seed_from(answer_id)))
        if last is not None and not parsed.stream:
            raise Refused(400, "Last-Event-ID: only streams can be resumed", code="invalid_event_id")
        return parsed, numbers_of(answer_id, last, self._call.prefix, body, ready, len(parsed.requests))


def _image_bytes(request: Request) -> int:
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        return sum(map(len, prompt.images.values()))
    return sum(map(len, prompt.images)) if isinstance(prompt, TextPrompt) else 0


def _images_and_encoding(choices: Choices) -> str:
    """Return the images and their encoding for the log, such as "1 image (640x480, 300 tokens), 1 encoded in 1.2 s"."""
    if not (images := choices.images):
        return ""
    encoded = f", {choices.encoded_images} encoded in {choices.encode_s:.1f} s" if choices.encoded_images else ""
    return f"{counted(len(images), 'image')} ({image_words(images)}){encoded}"


async def _collect(choices: Choices, answer: ApiAnswer) -> None:
    while (events := await choices.arrived()) is not None:
        for choice, event in events:
            answer.feed(choice, event)


async def _written(answer: ApiAnswer, is_long: bool) -> bytes:
    def write() -> bytes:
        return json_bytes_in_parts(answer.whole())

    return await off_the_loop(is_long, write)


CHAT = Call("chatcmpl-", parse_chat, ChatAnswer)
COMPLETION = Call("cmpl-", parse_completion, CompletionAnswer)


class ModelRoutes:
    """The list of models, including the upstreams' models, in the form of OpenAI's or Anthropic's API."""

    def __init__(self, service: Service) -> None:
        self._models, self._upstreams = service.models, service.upstreams

    async def list_models(self, request: HttpRequest) -> Response:
        bodies: list[Any] = [self._body(known) for known in await self._models.known.listed()]
        if self._upstreams is not None:
            bodies = self._upstreams.beside(bodies, request.headers)
        body = models_body(bodies)
        return json_response(anthropic_models(body) if VERSION_HEADER in request.headers else body)

    async def show_model(self, request: HttpRequest) -> Response:
        body = await self._shown(request.path_params["id"], request)
        return json_response(anthropic_model(body) if VERSION_HEADER in request.headers else body)

    async def _shown(self, name: str, request: HttpRequest) -> Any:
        try:
            return self._body(await self._models.find(name))
        except ModelNotFound:
            if self._upstreams is None:
                raise
            return self._upstreams.model(name, request.headers)

    def _body(self, known: KnownModel) -> Model:
        process = self._models.process_of(known)
        if process is None or process.facts is None:
            body = unloaded_model_body(known.name, self._models.created)
        else:
            body = model_body(Ready.under(known, process).facts, self._models.created)
        if known.parent:
            body["parent"] = known.parent
        return body


RESPONSE: Final = Call(PREFIX, parse_response, ResponseAnswer, RESPONSES)
_LONGEST_ID: Final = 100  # the maximum number of characters of an ID in an error message


async def no_stored_response(request: HttpRequest) -> Response:
    """Refuse requests for stored responses."""
    name = request.path_params["id"][:_LONGEST_ID]
    raise Refused(404, f"no such response: {name!r}; this server stores no responses", code="not_found")


MESSAGE = Call("msg_", parse_message, MessageAnswer, ANTHROPIC)
INFILL = Call("infill-", parse_infill, LlamaServerAnswer, LLAMA_SERVER)
LLAMA_COMPLETION = Call("completion-", parse_llama_completion, LlamaServerAnswer, LLAMA_SERVER)
