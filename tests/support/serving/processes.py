"""Served models for tests, whose engines run the scripted backend in real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.backends.base import OpenOptions
from llmrun.engine.child.messages import Open, Taken
from llmrun.engine.requests import ChatPrompt, Event, Finished, Request, TextDelta
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.processes.model_process import ModelProcess
from llmrun.serving.processes.supervisor import ServingLimits

PATIENCE_S = 30.0
DEADLY = [sys.executable, "-P", str(Path(__file__).with_name("deadly_child.py"))]


def scripted_model(
    folder: Path,
    name: str = "scripted",
    *,
    step_seconds: float = 0.0,
    max_wait_s: float | None = None,
    control_tokens: Sequence[str] = (),
    projector: Mapping[str, object] | None = None,
) -> Open:
    """Return what opens a scripted model with 4 sequences, which generates one token in a step.

    projector  the fields of ScriptedProjector, or None for a model that reads no images
    """
    script = folder / f"{name}.json"
    script.write_text(json.dumps({"step_seconds": step_seconds, "control_tokens": [*control_tokens]}))
    options = OpenOptions(backend="scripted", max_sequences=4)
    if projector is not None:
        (folder / "mmproj.json").write_text(json.dumps(projector))
        options = replace(options, mmproj=str(folder / "mmproj.json"))
    return Open(str(script), "a-model", options.portable(), speculate=False, max_wait_s=max_wait_s)


def chat(text: str, **options: object) -> Request:
    """Return a request whose answer is "You said: " and the text."""
    return Request(ChatPrompt([{"role": "user", "content": text}]), **options)  # type: ignore[arg-type]


def noise(seed: int, n_tokens: int = 40) -> Request:
    """Return a request whose answer is random, but depends on nothing but the seed."""
    prompt = ChatPrompt([{"role": "user", "content": f"question {seed}"}])
    sampling = SamplingParams(temperature=100.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    return Request(prompt, max_tokens=n_tokens, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client has heard. `pieces` are the texts and tokens of all deltas."""

    text: str
    pieces: tuple[tuple[str, tuple[int, ...]], ...]
    finished: Finished


class Listening:
    """A client that takes the events of one request as they arrive. Closing the iterator cancels the request."""

    def __init__(self, model: ModelProcess, request: Request) -> None:
        self._news = asyncio.Event()
        self.served = model.ask(request, self._news)

    async def accepted(self) -> Taken:
        return await self.served.accepted()

    def cancel(self) -> None:
        self.served.cancel()

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        try:
            while True:
                self._news.clear()
                for _, event in (arrived := self.served.take()):
                    yield event
                    if isinstance(event, Finished):
                        return
                if not arrived:
                    await self._news.wait()
        finally:
            self.cancel()


async def hear(model: ModelProcess, request: Request) -> Heard:
    """Ask a model and return the whole answer."""
    return heard([event async for event in Listening(model, request)])


def heard(events: Sequence[Event]) -> Heard:
    """Return what the events of one request say."""
    *_, last = events
    assert isinstance(last, Finished)
    deltas = tuple(event for event in events if isinstance(event, TextDelta))
    pieces = tuple((delta.text, delta.tokens) for delta in deltas)
    return Heard("".join(text for text, _ in pieces), pieces, last)


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    model: Open, limits: ServingLimits | None = None, command: Sequence[str] | None = None
) -> AsyncIterator[ModelProcess]:
    """Open a model, and close it at the end."""
    process = ModelProcess(model, limits, command=command)
    try:
        await process.start()
        yield process
    finally:
        await process.close()
