"""An engine with what a server needs in addition: who begins in a step, a first step alone, and counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.engine.engine import Engine
from llmrun.engine.requests import Event, Finished

if TYPE_CHECKING:
    from llmrun.engine.answer import Answer

OnBegin = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine. The last three fields count since it was opened."""

    steps: int
    running: int
    waiting: int
    free_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class ServedEngine(Engine):
    """An engine that reports which requests begin in a step, and can run a request's first step alone."""

    on_begin: OnBegin | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._alone: deque[Answer] = deque()
        self._begun: set[int] = set()
        self._counts = [0, 0, 0, 0]  # steps, prompt tokens, cached tokens, generated tokens

    @property
    def idle(self) -> bool:
        return super().idle and not self._alone

    def enqueue(self, answer: Answer, *, alone: bool = False) -> int:
        if not alone:
            return super().enqueue(answer)
        self._alone.append(answer)
        return answer.request_id

    def predicted_wait(self, answer: Answer) -> float:
        """Return the predicted seconds until the first step of an answer that would be queued now."""
        return 0.0 if self._slots.n_idle > len(self._waiting) else 0.1 * len(self._waiting)

    def status(self) -> EngineStatus:
        used = sum(len(slot.tokens) for slot in self._running.values())
        steps, prompt, cached, generated = self._counts
        waiting = len(self._waiting) + len(self._alone)
        free = self._backend.kv.capacity - used
        return EngineStatus(steps, len(self._running), waiting, free, prompt, cached, generated)

    def step(self) -> list[Event]:
        if not self._alone or not self._slots.n_idle:
            return self._counted(super().step())
        others, waiting = self._running, self._waiting
        self._running, self._waiting = {}, deque([self._alone.popleft()])
        try:
            return self._counted(super().step())
        finally:
            self._running = {**others, **self._running}
            self._waiting = deque([*self._waiting, *waiting])

    def _forward(self, work: Any) -> Any:
        begun = [part.answer.request_id for part in work if part.answer.request_id not in self._begun]
        if begun and self.on_begin is not None:
            self.on_begin(begun)
        self._begun.update(begun)
        self._counts[0] += 1
        return super()._forward(work)

    def _counted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Finished):
                self._begun.discard(event.request_id)
                timings = event.timings
                self._counts[1] += timings.prompt_tokens
                self._counts[2] += timings.cached_tokens
                self._counts[3] += timings.generated_tokens
        return events
