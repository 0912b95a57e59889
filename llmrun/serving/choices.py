"""The requests of one API call, one for each choice. They run at the same time and end together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from llmrun.engine.requests import Event, Finished, Request, TextDelta
from llmrun.serving.metrics import Metrics
from llmrun.serving.model import Accepted, Asked, ServedModel

_MOST_EVENTS = 64  # further events wait in the model, which limits them


class Choices:
    """Asks a model for all choices of a call and merges their events.

    If one of them fails, or when the `async with` block ends, all are cancelled.

    wait_s            the predicted seconds until the last choice begins, once all were accepted
    prompt_tokens     tokens of the prompt, once it was accepted
    generated_tokens  tokens of all finished choices together
    """

    def __init__(self, model: ServedModel, requests: Sequence[Request], metrics: Metrics) -> None:
        self._model, self._requests, self._metrics = model, requests, metrics
        self._asked_at = time.perf_counter()
        self._asked: list[Asked] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._unfinished = 0
        self._events: deque[tuple[int, Event]] = deque()
        self._failure: BaseException | None = None
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self.wait_s = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    async def accepted(self) -> None:
        """Send the requests and wait until the engine has accepted all of them. Raises the error of the first that
        it refuses."""
        for request in self._requests:
            self._asked.append(self._model.ask(request))
        self._begin([await asked.accepted() for asked in self._asked])

    def _begin(self, accepted: Sequence[Accepted]) -> None:
        self.wait_s = max(answer.wait_s for answer in accepted)
        self.prompt_tokens = accepted[0].prompt_tokens
        self._unfinished = len(self._asked)
        for choice, (asked, answer) in enumerate(zip(self._asked, accepted, strict=True)):
            self._pumps.append(asyncio.create_task(self._pump(choice, asked, answer.wait_s)))

    async def arrived(self, until: float | None = None) -> list[tuple[int, Event]] | None:
        """Wait for events and return those that have arrived, each with the number of its choice.

        Returns None after the last event of the last choice, and an empty list if nothing has arrived until the time
        `until` of the event loop's clock. Raises the error of a choice that failed.
        """
        try:
            async with asyncio.timeout_at(until):
                await self._news.wait()
        except TimeoutError:
            return []
        if self._failure is not None:
            raise self._failure
        events = list(self._events)
        self._events.clear()
        self._taken.set()
        if self._unfinished:
            self._news.clear()
        return events if events or self._unfinished else None

    async def _pump(self, choice: int, asked: Asked, predicted_wait_s: float) -> None:
        """Move the events of one choice to the queue of all."""
        last_token = 0.0
        try:
            async for event in asked:
                if isinstance(event, TextDelta) and event.tokens:
                    last_token = self._observe_token(last_token)
                elif isinstance(event, Finished):
                    self._observe_end(event, predicted_wait_s)
                self._events.append((choice, event))
                self._news.set()
                while len(self._events) >= _MOST_EVENTS:
                    self._taken.clear()
                    await self._taken.wait()
        except Exception as error:  # noqa: BLE001  `arrived` raises it
            self._failure = self._failure or error
        finally:
            self._unfinished -= 1
            self._news.set()

    def _observe_token(self, last: float) -> float:
        now = time.perf_counter()
        if last:
            self._metrics.between_tokens.observe(now - last)
        else:
            self._metrics.first_token.observe(now - self._asked_at)
        return now

    def _observe_end(self, event: Finished, predicted_wait_s: float) -> None:
        self.generated_tokens += event.timings.generated_tokens
        if event.timings.ttft_s:
            self._metrics.count_wait(predicted_wait_s, max(0.0, event.timings.ttft_s - event.timings.prefill_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for asked in self._asked:
            asked.cancel()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
