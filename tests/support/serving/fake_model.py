"""A served model that plays scripted events, and tells the test what happened to its requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np

from llmrun.base.errors import LlmrunError, Unavailable, UsageError
from llmrun.base.types import FinishReason, ModelInfo, Timings
from llmrun.engine.child.messages import Embed, Embedded, Taken
from llmrun.engine.requests import (
    ChatPrompt,
    Event,
    Finished,
    ModelFacts,
    PrefillProgress,
    Request,
    SeenImage,
    TextDelta,
    TextPrompt,
)
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.processes.request import Arrival, ServedRequest
from llmrun.serving.processes.served_model import Load, State

TIMEOUT_S = 30.0  # for a stuck test; a normal one waits for milliseconds
BEGIN = "begin"  # an item of a script: the request begins without an event, as when its image is encoded
HOLD = "hold"  # an item of a script: wait until the test releases the model, or until the request is cancelled

# A float is a time: wait until so many seconds after the request began.
Script = Sequence[Event | LlmrunError | str | float]

FACTS = ModelFacts(
    name="fake",
    info=ModelInfo(
        path="fake.gguf",
        name="fake",
        architecture="fake",
        file_type="F32",
        parameters=0,
        file_bytes=0,
        vocabulary_size=1000,
        train_context=4096,
        context_size=4096,
        max_sequences=4,
        backend="scripted",
        device="",
        threads=1,
    ),
    kv_tokens=16384,
    takes_chats=True,
    takes_tools=False,
    fills=True,
    thinks=False,
    end_tokens=(),
    default_sampling=SamplingParams(),
    fingerprint="fp-fake",
)
LOAD = Load(
    beat_age_s=0.1,
    steps=7,
    running=2,
    waiting=1,
    free_tokens=1000,
    prompt_tokens=50,
    cached_tokens=10,
    generated_tokens=40,
    preemptions=3,
    wait_s=0.5,
    restarts=0,
)
TIMINGS = Timings(0.0, 3, 0, 2, 0.1, 0.3, 0.1, 0.4)


def text(*words: str) -> list[Event]:
    """Return the events of an answer with one token per word."""
    deltas = [TextDelta(0, word, (number,)) for number, word in enumerate(words)]
    end = Finished(0, FinishReason.STOP, None, 5, replace(TIMINGS, generated_tokens=len(words)))
    return [PrefillProgress(0, 3, 3), *deltas, end]


class ScriptedRequest(ServedRequest):
    """A request whose events are scripted."""

    def __init__(self, model: FakeModel, request: Request, script: Script, news: asyncio.Event) -> None:
        super().__init__(0, request, 0.0, 0, 0, news, lambda: None, lambda request: None)
        self._model, self._script = model, script
        self._ended = asyncio.Event()

    @property
    def has_left(self) -> bool:
        """True if the request has ended or its client has cancelled it."""
        return self.over or self._ended.is_set()

    async def accepted(self) -> Taken:
        if isinstance(refusal := self._model.refusal, LlmrunError):
            raise refusal
        self._model.count("accepted")
        self._running = asyncio.create_task(self._run())
        return Taken(0, 3, self._model.wait_s, self._model.first_token_s, images=self._model.images)

    def take(self) -> list[Arrival]:
        arrived, self._arrived = self._arrived, []
        if self._error is not None and not arrived:
            raise self._error
        return arrived

    async def _run(self) -> None:
        try:
            async for event in self._events():
                self.has_begun = True
                self._arrived.append(Arrival(time.perf_counter(), event))
                self.news.set()
        except LlmrunError as error:
            self._error = error
        self.over = True
        self.news.set()

    async def _events(self) -> AsyncIterator[Event]:
        began = time.perf_counter()
        for item in self._script:
            if isinstance(item, LlmrunError):
                raise item
            if item == BEGIN:
                self.has_begun = True
            elif isinstance(item, str):
                self._model.count("held")
                await self._released_or_ended()
            elif isinstance(item, float):
                await asyncio.sleep(max(0.0, began + item - time.perf_counter()))
            else:
                yield item
            if self._ended.is_set():
                return
            await asyncio.sleep(0)

    async def _released_or_ended(self) -> None:
        waits = [asyncio.create_task(self._model.released.wait()), asyncio.create_task(self._ended.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def cancel(self) -> None:
        if not self.over and not self._ended.is_set():
            self._ended.set()
            self._model.count("cancelled")

    def fail(self, error: LlmrunError) -> None:
        if not self.over:
            self._error = error
            self._ended.set()


class FakeModel:
    """A ServedModel. `script` is called for each request, with its number.

    refusal   the error with which the engine refuses requests, if any
    wait_s    the predicted wait of a request in seconds
    first_token_s  the predicted seconds until a request's first token, or None if unknown
    images    the images of every prompt
    openable  set when opening the model may end
    broken    the error with which it then ends, if any
    tenants   whose calls of tokenize and detokenize there were
    counted_prompts  the requests whose prompts were counted
    embedded  the calls for embeddings and scores
    embedding_error  the error with which they end, if any
    """

    def __init__(self, script: Callable[[int], Script] = lambda number: text("Hello", " there")) -> None:
        self.facts: ModelFacts | None = FACTS
        self.state = State.READY
        self.load = LOAD
        self.most_requests = 128
        self.most_bytes = 1 << 26
        self.tenants: list[str] = []
        self.counted_prompts: list[Request] = []
        self.embedded: list[Embed] = []
        self.embedding_error: Exception | None = None
        self.refusal: LlmrunError | None = None
        self.wait_s = 0.25
        self.first_token_s: float | None = None
        self.images: tuple[SeenImage, ...] = ()
        self.broken: LlmrunError | None = None
        self.openable = asyncio.Event()
        self.openable.set()
        self.asked: list[ScriptedRequest] = []
        self.released = asyncio.Event()
        self._script = script
        self._counts: dict[str, int] = {}
        self._changed = threading.Condition()

    async def start(self) -> None:
        self.count("started")
        await self.openable.wait()
        if self.broken is not None:
            raise self.broken

    async def drain(self, seconds: float) -> None:
        """Like ModelProcess: end what has not begun, wait for the rest, and then end that too."""
        self.state = State.DRAINING
        self.count("draining")
        self._end([asked for asked in self.asked if not asked.has_begun])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not all(asked.over for asked in self.asked):
                    await asyncio.sleep(0.01)
        self._end(self.asked)

    async def close(self) -> None:
        self.count("closed")
        self._end(self.asked)

    def _end(self, asked: Sequence[ScriptedRequest]) -> None:
        for one in asked:
            one.fail(Unavailable("the server is shutting down", state="draining"))

    def ask(self, request: Request, news: asyncio.Event) -> ScriptedRequest:
        if self.state is not State.READY:
            raise Unavailable("not ready", state=self.state.value)
        self.asked.append(ScriptedRequest(self, request, self._script(len(self.asked)), news))
        return self.asked[-1]

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool, tenant: str = "") -> list[int]:
        self.tenants.append(tenant)
        return [*([1] if add_special else []), *text.encode()]

    async def detokenize(self, tokens: Sequence[int], *, tenant: str = "") -> bytes:
        self.tenants.append(tenant)
        if any(not 0 <= token < 256 for token in tokens):
            raise UsageError("no such token")
        return bytes(tokens)

    async def spell(self, tokens: Sequence[int], *, tenant: str = "") -> Sequence[bytes]:
        return [await self.detokenize([token], tenant=tenant) for token in tokens]

    async def embed(self, wanted: Embed) -> Embedded:
        """Return vectors of [number of characters or tokens, 0.5], or that number as the score of a document."""
        self.embedded.append(wanted)
        if self.embedding_error is not None:
            raise self.embedding_error
        sizes = [len(each.text if isinstance(each, TextPrompt) else each.tokens) for each in wanted.inputs]
        rows = [[size] if wanted.query is not None else [size, 0.5] for size in sizes]
        return Embedded(0, np.array(rows, np.float32).tobytes(), sizes)

    async def count_prompt(self, request: Request) -> int:
        self.counted_prompts.append(request)
        return 42

    async def render_prompt(self, request: Request) -> str:
        assert isinstance(request.prompt, ChatPrompt)
        return "".join(f"<{message['role']}>{message['content']}" for message in request.prompt.messages)

    def count(self, what: str) -> None:
        with self._changed:
            self._counts[what] = self._counts.get(what, 0) + 1
            self._changed.notify_all()

    def counted(self, what: str) -> int:
        return self._counts.get(what, 0)

    def wait_for(self, what: str, count: int = 1) -> None:
        """Wait in the test's thread until `count` requests were accepted, held or cancelled."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.counted(what) >= count, TIMEOUT_S), f"{what}: {self._counts}"
