"""Workers for tests, which answer at once, late, or not at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.base.errors import LlmrunError, NetworkError
from llmrun.jobs.batching.work import Tally
from llmrun.jobs.batching.workers.base import Reply, WorkerLost

CARD: Mapping[str, Any] = {
    "id": "a-model",
    "owned_by": "llmrun",
    "max_model_len": 4096,
    "system_fingerprint": "fp_0123456789abcdef",
    "default_sampling": {"temperature": 0.8},
    "batch_invariant": True,
}


def echo(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer that depends only on the call, apart from the fields that a batch leaves out."""
    content = f"{body.get('messages') or body.get('prompt')}, seed {body['seed']}"
    return {
        "id": f"random-{random.random()}",
        "object": "chat.completion",
        "created": int(random.random() * 1e9),
        "model": "what the worker says",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": random.randrange(10)},
        },
        "timings": {"predicted_ms": random.random()},
    }


class FakeWorker:
    """A worker whose answers repeat the call.

    dies_after   the number of answers after which it is lost, each time that it is opened; None for never
    opens        how often it can be opened
    delay_s      the longest time that an answer takes
    asked        the calls it got, and `started` how often it was opened
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        slots: int = 4,
        card: Mapping[str, Any] = CARD,
        dies_after: int | None = None,
        opens: int = 1000,
        delay_s: float = 0.0,
    ) -> None:
        self.name, self.slots = name, slots
        self.card, self.dies_after, self.opens, self.delay_s = card, dies_after, opens, delay_s
        self.asked: list[Mapping[str, Any]] = []
        self.started = 0
        self.is_open = False
        self._left = 0

    async def start(self) -> Mapping[str, Any]:
        if self.started >= self.opens:
            raise NetworkError(f"{self.name}: nobody is there")
        self.started += 1
        self.is_open = True
        self._left = -1 if self.dies_after is None else self.dies_after
        return self.card

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        await asyncio.sleep(random.random() * self.delay_s)
        if "three machines" in str(body.get("prompt")):  # the proof
            return Reply(200, {"choices": [{"text": "ok"}]})
        if self._left == 0 or not self.is_open:
            raise WorkerLost(f"{self.name}: gone")
        self._left -= 1
        self.asked.append(body)
        if "refused" in str(body):
            return Reply(400, {"error": {"message": "refused", "type": "invalid_request_error"}})
        return Reply(200, echo(url, body))

    async def close(self) -> None:
        self.is_open = False


class Told:
    """A reporter that records notes and progress."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tallies: list[int] = []

    def progress(self, tally: Tally) -> None:
        self.tallies.append(tally.done)

    def waiting(self, words: str) -> None:
        del words

    def note(self, words: str) -> None:
        self.notes.append(words)


class Failing(FakeWorker):
    """A worker that cannot be opened."""

    def __init__(self, error: LlmrunError) -> None:
        super().__init__("failing")
        self._error = error

    async def start(self) -> Mapping[str, Any]:
        raise self._error


def asked_by(workers: Sequence[FakeWorker]) -> list[str]:
    """Return the messages of all calls that the workers got."""
    return [str(body.get("messages") or body.get("prompt")) for worker in workers for body in worker.asked]
