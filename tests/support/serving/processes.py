"""Served models for tests, whose engines run the scripted backend in real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from llmrun.backends.base import OpenOptions
from llmrun.engine.child.messages import Open
from llmrun.engine.child.opening import portable_options
from llmrun.engine.requests import ChatPrompt, Event, Finished, Request, TextDelta
from llmrun.sampling_params import SamplingParams
from llmrun.serving.process.limits import ServingLimits
from llmrun.serving.process.model_process import ModelProcess

DEADLY = [sys.executable, "-P", str(Path(__file__).with_name("deadly_child.py"))]


def scripted_model(folder: Path, *, max_sequences: int = 4, step_seconds: float = 0.0, **opening: object) -> Open:
    """Return what opens a scripted model."""
    script = folder / f"scripted-{step_seconds}.json"
    script.write_text(json.dumps({"step_seconds": step_seconds}))
    options = OpenOptions(backend="scripted", max_sequences=max_sequences)
    return Open(str(script), portable_options(options), **opening)  # type: ignore[arg-type]


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
    """What a client has heard."""

    text: str
    deltas: tuple[TextDelta, ...]
    finished: Finished


async def hear(model: ModelProcess, request: Request) -> Heard:
    """Ask a model and return the whole answer."""
    return heard([event async for event in model.ask(request)])


def heard(events: Sequence[Event]) -> Heard:
    """Return what the events of one request say."""
    *_, last = events
    assert isinstance(last, Finished)
    deltas = tuple(event for event in events if isinstance(event, TextDelta))
    return Heard("".join(delta.reasoning + delta.text for delta in deltas), deltas, last)


@asynccontextmanager
async def running(
    model: Open, limits: ServingLimits | None = None, command: Sequence[str] | None = None
) -> AsyncIterator[ModelProcess]:
    """Open a model, and close it at the end."""
    process = ModelProcess("a-model", model, limits, command=command)
    try:
        await process.start()
        yield process
    finally:
        await process.close()
