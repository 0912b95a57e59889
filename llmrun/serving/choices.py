"""The choices of one call: their requests to the model, and the events of all of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from llmrun.engine.requests import Event, Finished, Request, TextDelta
from llmrun.serving.metrics import Metrics
from llmrun.serving.processes.served_model import Asked, ServedModel

_MANY_TOKENS = 256  # writing the log-probabilities of so many tokens takes 20 ms
_MOST_EVENTS = 64  # at a time; writing so many takes a millisecond


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
        self._waits: list[float] = []  # the predicted seconds in the queue, one for each choice
        self._last_tokens = [0.0] * len(requests)  # when they arrived; 0 before the first one
        self._unfinished = len(requests)
        self._arrived: deque[tuple[int, Event]] = deque()
        self._news = asyncio.Event()
        self.wait_s = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    @property
    def is_long(self) -> bool:
        """Whether writing all finished choices takes so long that it must not hold up other clients."""
        return self.generated_tokens > _MANY_TOKENS

    async def accepted(self) -> None:
        """Send the requests and wait until the engine has accepted all of them. Raises the error of the first that
        it refuses."""
        for request in self._requests:
            self._asked.append(self._model.ask(request, self._news))
        for asked in self._asked:
            accepted = await asked.accepted()
            self._waits.append(accepted.wait_s)
            self.prompt_tokens = accepted.prompt_tokens
        self.wait_s = max(self._waits, default=0.0)

    async def arrived(self, until: float | None = None) -> list[tuple[int, Event]] | None:
        """Wait for events and return those that have arrived, each with the number of its choice.

        Returns None after the last event of the last choice, and an empty list if nothing has arrived until the time
        `until` of the event loop's clock. Raises the error of a choice that failed. If many events have arrived, each
        call returns some of them.
        """
        if self._arrived:
            await asyncio.sleep(0)  # a client that could not read for a while must not hold up the others
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
        # This runs for every token of every client, and asyncio.timeout_at does more: it cancels the task.
        timer = None if until is None else asyncio.get_running_loop().call_at(until, self._news.set)
        try:
            await self._news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _take(self) -> None:
        for choice, asked in enumerate(self._asked):
            for at, event in asked.take():
                self._observe(choice, at, event)
                self._arrived.append((choice, event))

    def _observe(self, choice: int, at: float, event: Event) -> None:
        if isinstance(event, TextDelta) and event.tokens:
            if last := self._last_tokens[choice]:
                self._metrics.between_tokens.observe(at - last)
            else:
                self._metrics.first_token.observe(at - self._asked_at)
            self._last_tokens[choice] = at
        elif isinstance(event, Finished):
            self._unfinished -= 1
            self.generated_tokens += event.timings.generated_tokens
            if event.timings.ttft_s:
                actual = max(0.0, event.timings.ttft_s - event.timings.prefill_s)
                self._metrics.count_wait(self._waits[choice], actual)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for asked in self._asked:
            asked.cancel()
