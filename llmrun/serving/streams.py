"""Streams the answers of all choices of a call, as server-sent events or in another form, and resumes broken streams.

Streams are resumed without stored state. The ID of an event contains the ID of its answer, and the time and the default
seed are derived from this ID. Therefore a repeated request produces the same bytes, and the server skips the events
that the client has already received. Streams resume even after a restart, and on another server with the same model.

Backpressure needs no code here: `send` waits while the connection's buffer is full, and meanwhile the events of the
answer accumulate in memory, so that decoding never waits for a client. If a client reads nothing for a minute,
http_server.py aborts the connection, which cancels the client's requests like any other disconnect.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from starlette.types import Send

from llmrun.base.errors import LlmrunError, ModelFileError, UsageError
from llmrun.engine.child.messages import Taken
from llmrun.engine.remote.stream import FORM
from llmrun.engine.requests import (
    Event,
    Finished,
    PrefillProgress,
    PrefixReport,
    PromptDelta,
    Request,
    SeenImage,
    TextDelta,
)
from llmrun.serving.bodies import off_the_loop
from llmrun.serving.exchanges import AnswerId
from llmrun.serving.metrics import Metrics
from llmrun.serving.models.registry import Ready
from llmrun.serving.processes.request import ServedRequest
from llmrun.serving.processes.served_model import ServedModel
from llmrun.serving.protocol.images import remember_unreadable
from llmrun.serving.protocol.openai.objects import PromptProgress
from llmrun.serving.protocol.parsed import ApiAnswer, FailingAnswer, PatientAnswer, ProgressAnswer
from llmrun.serving.protocol.wire import WireFormat
from llmrun.serving.refusals import Refused, as_api_error

HEADER: Final = "last-event-id"
_CHECK_LETTERS: Final = 8


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event of a stream that a client has seen, as named in the client's Last-Event-ID header.

    check   the hash that identifies the request and the model; see `check_of`
    number  the number of the event, counted from 1
    """

    answer: AnswerId
    check: str
    number: int


def read_last_event(headers: Mapping[str, str]) -> LastEvent | None:
    """Return the last event that the client has seen, or None if the request does not resume a stream.

    Raises Refused if the header is not the event ID of an llmrun server.
    """
    given = headers.get(HEADER)
    if not given:
        return None
    found = FORM.fullmatch(given)
    if found is None:
        raise Refused(400, f"Last-Event-ID: {given[:60]!r} is not an event ID", code="invalid_event_id")
    return LastEvent(AnswerId(found["answer"]), found["check"], int(found["number"]))


@dataclass(slots=True)
class EventNumbers:
    """Numbers the events of a stream, and skips the events that the client has seen.

    skipped  the number of events at the beginning that are not sent
    """

    prefix: str
    skipped: int = 0
    last: int = 0

    def next_id(self) -> str | None:
        """Return the ID of the next event: "" in streams without IDs, or None if the client has seen the event."""
        self.last += 1
        if self.last <= self.skipped:
            return None
        return f"{self.prefix}-{self.last}" if self.prefix else ""


NO_IDS: Final = ""


def numbers_of(
    answer: AnswerId, last: LastEvent | None, api: str, body: Mapping[str, Any], ready: Ready, choices: int
) -> EventNumbers:
    """Return the numbers for the events of a stream. `api` identifies the form of the events.

    Events have IDs only if the stream contains one answer, because the events of several answers arrive in any order,
    and only if the model is deterministic. Raises Refused if the client wants to resume another stream.
    """
    resumable = choices == 1 and ready.facts.info.batch_invariant
    if last is None and not resumable:
        return EventNumbers(NO_IDS)
    check = check_of(body, f"{api} {ready.signature}")
    if last is not None and not (resumable and last.check == check):
        words = "Last-Event-ID: the stream belonged to another request or model; send the same body to the same model"
        raise Refused(409, words, code="other_stream")
    return EventNumbers(f"{answer}-{check}", 0 if last is None else last.number)


def check_of(body: Mapping[str, Any], signature: str) -> str:
    """Return a short hash of everything that determines the events of a stream, apart from the answer's ID.

    signature  a string that identifies the model and the form of the events
    """
    content = json.dumps([signature, body], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:_CHECK_LETTERS]


_MANY_TOKENS = 256  # writing the log-probabilities of 256 tokens takes 20 ms
_DECODING_S = 2.0  # decoding nearly any photo takes less time, and the head of the response should not come later
_MOST_EVENTS = 64  # the number of events written at a time; writing 64 events takes a millisecond


class Choices:
    """Requests all choices of a call from a model, and merges the choices' events.

    All choices are cancelled when one choice fails or the `async with` block ends.

    wait_s         the predicted seconds until the last choice begins; 0 until all choices are accepted
    first_token_s  the predicted seconds until the first choice's first token, or None if unknown
    prompt_tokens  the number of prompt tokens; 0 until a choice is accepted
    prefill_s      the seconds that the prompt took; 0 until a choice is finished
    encoded_images the number of images that were encoded for finished choices
    encode_s       the seconds for encoding them
    problem        why the model failed, for the server's log and not for clients; "" if the model did not fail
    """

    def __init__(self, model: ServedModel, requests: Sequence[Request], metrics: Metrics) -> None:
        self._model, self._requests, self._metrics = model, requests, metrics
        self._asked_at = time.perf_counter()
        self._n_described = 0  # the number of prompt tokens with log-probabilities
        self._served: list[ServedRequest] = []
        self._taken: list[tuple[Taken, float]] = []  # the engine's predictions for each choice, and when they arrived
        self._last_tokens = [0.0] * len(requests)  # when each choice's last token arrived; 0 before the first token
        self._prompts: dict[int, PrefillProgress] = {}  # the progress of the prompts that are being processed
        self._generated = [0] * len(requests)
        self._unfinished = len(requests)
        self._arrived: deque[tuple[int, Event]] = deque()
        self._news = asyncio.Event()
        self.wait_s = 0.0
        self.first_token_s: float | None = None
        self.prompt_tokens = 0
        self.prefill_s = 0.0
        self.encoded_images, self.encode_s = 0, 0.0
        self.problem = ""

    @property
    def prefix(self) -> PrefixReport | None:
        """How much of the prompt the first choice has reused, or will probably reuse; None before its acceptance.

        Other choices of the same call copy the prompt of the first choice.
        """
        taken = self._served[0].taken if self._served else None
        return None if taken is None else taken.prefix

    @property
    def images(self) -> Sequence[SeenImage]:
        """The images of all prompts; () before their acceptance. The choices of one prompt have the same images."""
        return [
            image
            for number, (taken, _) in enumerate(self._taken)
            if not number or self._requests[number].prompt != self._requests[number - 1].prompt
            for image in taken.images
        ]

    @property
    def generated_tokens(self) -> int:
        """The number of tokens that all choices have generated so far, including cancelled choices."""
        return sum(self._generated)

    @property
    def words(self) -> str:
        """A comment for people about the progress of the first prompt that is being processed."""
        if (prompt := next(iter(self._prompts.values()), None)) is not None:
            return prompt.image.words if prompt.image else f"processing prompt {prompt.done}/{prompt.total}"
        return "ping"

    def seconds_of(self, choice: int) -> float:
        """Return the seconds since the processing of a choice's prompt began."""
        began = self._served[choice].begun_at
        return time.perf_counter() - began if began else 0.0

    @property
    def is_long(self) -> bool:
        """True if writing the finished choices takes so long that other clients would be held up."""
        return self.generated_tokens + self._n_described > _MANY_TOKENS

    async def accepted(self) -> None:
        """Send the requests and wait until the engine has accepted all of them. If the engine refuses a request, the
        error of the first refused request is raised."""
        for request in self._requests:
            self._served.append(self._model.ask(request, self._news))
        for request, served in zip(self._requests, self._served, strict=True):
            try:
                taken = await served.accepted()
            except UsageError as error:
                remember_unreadable(request.prompt, error)
                raise
            self._taken.append((taken, time.perf_counter()))
            self.prompt_tokens = taken.prompt_tokens
        self.wait_s = max((taken.wait_s for taken, _ in self._taken), default=0.0)
        predicted = [taken.first_token_s for taken, _ in self._taken if taken.first_token_s is not None]
        self.first_token_s = min(predicted, default=None)

    async def begun(self) -> None:
        """Wait a moment for the first token of a prompt with images. Raises the error of a choice that has failed.

        Some damage of images is found only by decoding them, which begins after the acceptance of the request. While
        the response has not begun, such errors get a status of their own.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + _DECODING_S
        while self._unfinished and not any(self._generated) and clock() < until:
            n_arrived = len(self._arrived)
            self._news.clear()
            self._take()
            if len(self._arrived) == n_arrived:
                await self._wait(until)

    async def arrived(self, until: float | None = None) -> list[tuple[int, Event]] | None:
        """Wait for events and return the events that have arrived, each with the number of its choice.

        Returns None after the last event of the last choice, and an empty list if nothing has arrived by `until`, a
        time of the event loop's clock. Raises the error of a failed choice. If many events have arrived, each call
        returns only some of the events.
        """
        if self._arrived:
            await asyncio.sleep(0)  # a client with many pending events must not hold up other clients
        elif not self._unfinished:
            return None
        else:
            self._news.clear()
            self._take()
            if not self._arrived:
                await self._wait(until)
                self._take()
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), _MOST_EVENTS))]

    async def _wait(self, until: float | None) -> None:
        # This method runs for every token of every client. asyncio.timeout_at cancels the task, which would be slower.
        timer = None if until is None else asyncio.get_running_loop().call_at(until, self._news.set)
        try:
            await self._news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _take(self) -> None:
        for choice, served in enumerate(self._served):
            try:
                events = served.take()
            except UsageError as error:
                remember_unreadable(self._requests[choice].prompt, error)
                raise
            except ModelFileError as error:
                self.problem = str(error)
                raise
            for at, event in events:
                self._observe(choice, at, event)
                self._arrived.append((choice, event))

    def _observe(self, choice: int, at: float, event: Event) -> None:
        if isinstance(event, PrefillProgress):
            self._prompts[choice] = event
            return
        self._prompts.pop(choice, None)
        if isinstance(event, TextDelta) and event.tokens:
            self._generated[choice] += len(event.tokens)
            if last := self._last_tokens[choice]:
                self._metrics.between_tokens.observe(at - last)
            else:
                self._metrics.first_token.observe(at - self._asked_at)
                taken, taken_at = self._taken[choice]
                if taken.first_token_s is not None:
                    self._metrics.count_first_token(taken.first_token_s, max(at - taken_at, 0.0))
            self._last_tokens[choice] = at
        elif isinstance(event, PromptDelta):
            self._n_described += len(event.logprobs)
        elif isinstance(event, Finished):
            self._unfinished -= 1
            self.prefill_s = max(self.prefill_s, event.timings.prefill_s)
            self.encoded_images += event.timings.encoded_images
            self.encode_s += event.timings.encode_s
            self._generated[choice] = event.timings.generated_tokens  # also counts the token that ends the answer
            if event.timings.ttft_s:
                actual = max(0.0, event.timings.ttft_s - event.timings.prefill_s - event.timings.image_wait_s)
                self._metrics.count_wait(self._taken[choice][0].wait_s, actual)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for served in self._served:
            served.cancel()


_HEADERS = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would otherwise buffer the events
}


@dataclass(frozen=True, slots=True)
class Stream:
    """The form of one stream.

    large   True if the request is large. The first and last events of some APIs and those without IDs repeat most of it
    ping_s  the longest silence in seconds
    client  the client's User-Agent
    returns_progress  True if the client asked for the progress of the prompt
    """

    wire: WireFormat
    numbers: EventNumbers
    headers: Mapping[str, str]
    large: bool
    ping_s: float
    client: str
    returns_progress: bool

    async def send(self, send: Send, choices: Choices, answer: ApiAnswer) -> bool:
        """Send an answer whose requests have been accepted, and return False if the answer failed.

        If the answer fails, the last event of the stream reports the error. Bugs are also raised as exceptions.
        """
        headers = {"content-type": self.wire.media_type, **_HEADERS, **self.headers}
        fields = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        try:
            await self._send_events(send, choices, answer)
            # The last chunks of some APIs repeat the whole answer.
            is_long = self.large or choices.is_long
            last = await off_the_loop(is_long, lambda: self._framed(answer.finish())) + self.wire.end
        except Exception as error:
            # Clients recognize a failed stream by the error event and the missing end marker.
            await _end(send, b"".join(self.wire.frame(chunk, "") for chunk in self._last_words(answer, error)))
            if not isinstance(error, LlmrunError):
                raise
            return False
        await _end(send, last)
        return True

    async def _send_events(self, send: Send, choices: Choices, answer: ApiAnswer) -> None:
        clock = asyncio.get_running_loop().time
        told_at = sent_at = clock()  # when the last event and the last bytes were sent
        patient = answer if isinstance(answer, PatientAnswer) else None
        patience_s = math.inf if patient is None else patient.patience_s(self.client)
        progress = _Progress(answer if self.returns_progress and isinstance(answer, ProgressAnswer) else None)
        while (events := await choices.arrived(sent_at + self.ping_s)) is not None:
            chunks: list[Mapping[str, Any]] = []
            try:
                for choice, event in events:
                    chunks += answer.feed(choice, event)
                    if isinstance(event, PrefillProgress):
                        chunks += map(Unnumbered, progress.chunks(choice, event, choices.seconds_of(choice)))
                if patient is not None and not chunks and clock() - told_at >= patience_s:
                    chunks += patient.begin(choices.prompt_tokens) or map(Unnumbered, patient.keep_alive())
            finally:  # events that arrived before an error are sent, too
                is_small = self.numbers.last and not any(isinstance(chunk, Unnumbered) for chunk in chunks)
                data = await off_the_loop(self.large and not is_small, partial(self._framed, chunks))
                if data:
                    told_at = clock()
                elif clock() - sent_at >= self.ping_s:
                    data = self.wire.ping(choices.words)
                if data:
                    sent_at = clock()
                    await send({"type": "http.response.body", "body": data, "more_body": True})

    def _last_words(self, answer: ApiAnswer, error: Exception) -> Sequence[Mapping[str, Any]]:
        """Return the chunks that report an error."""
        told = as_api_error(error)
        return answer.failed(told) if isinstance(answer, FailingAnswer) else [self.wire.error_chunk(told)]

    def _framed(self, chunks: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(self._frames(chunks))

    def _frames(self, chunks: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        for chunk in chunks:
            event_id = "" if isinstance(chunk, Unnumbered) else self.numbers.next_id()
            if event_id is not None:
                yield self.wire.frame(chunk, event_id)


class Unnumbered(dict[str, Any]):
    """A chunk that depends on the time. A stream that is resumed need not repeat it, so it has no event ID."""


class _Progress:
    """Reports the progress of prompts, beginning with their cached tokens. `answer` is None if nobody asked for it."""

    def __init__(self, answer: ProgressAnswer | None) -> None:
        self._answer, self._begun = answer, set[int]()

    def chunks(self, choice: int, event: PrefillProgress, seconds: float) -> Iterator[Mapping[str, Any]]:
        if self._answer is None:
            return
        if choice not in self._begun and event.done > event.cached:
            yield from self._answer.progress(choice, _told(event, event.cached, 0.0))
        self._begun.add(choice)
        yield from self._answer.progress(choice, _told(event, event.done, seconds))


def _told(event: PrefillProgress, done: int, seconds: float) -> PromptProgress:
    told: PromptProgress = {
        "total": event.total,
        "cache": event.cached,
        "processed": done,
        "time_ms": round(seconds * 1000),
    }
    if (image := event.image) is not None:
        told["image"] = {"number": image.number, "count": image.count, "share": round(image.share, 3)}
        if image.left_s is not None:
            told["image"]["left_ms"] = round(image.left_s * 1000)
    return told


async def _end(send: Send, last: bytes) -> None:
    await send({"type": "http.response.body", "body": last, "more_body": False})
