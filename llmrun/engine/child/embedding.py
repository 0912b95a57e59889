"""Computes embeddings and scores between the steps of the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import Cancelled
from llmrun.engine.child.messages import Embed, Embedded, Rejected
from llmrun.engine.embedding.inputs import InputReader, limited
from llmrun.engine.embedding.jobs import EmbeddingJob
from llmrun.engine.requests import TextPrompt

if TYPE_CHECKING:
    from llmrun.engine.child.messages import FromChild
    from llmrun.engine.engine import Engine
    from llmrun.engine.stats import EngineStatus


_PART_BYTES: Final = 1 << 17  # of results; decoding a message of 60 MB would hold up the server for a second


@dataclass(slots=True)
class _Call:
    """A call that has not ended.

    job     None until the inputs have been read
    n_sent  number of results that have been sent
    """

    job: EmbeddingJob | None = None
    n_sent: int = 0


class Embedding:
    """The calls of clients that want vectors or scores.

    send     sends a message to the server; thread-safe
    on_pass  called before a pass with the number of its rows
    """

    def __init__(self, engine: Engine, send: Callable[[FromChild], None], on_pass: Callable[[int], None]) -> None:
        self._embedder, self._send = engine.embedder(on_pass), send
        self._reader = InputReader(engine.info, engine.tokenizer, 'set "truncate": true')
        self._lock = Lock()
        self._calls: dict[int, _Call] = {}
        self._tokens = 0

    @property
    def idle(self) -> bool:
        return self._embedder.idle

    def expect(self, call: int) -> None:
        """Note that a call has arrived."""
        with self._lock:
            self._calls[call] = _Call()

    def add(self, message: Embed) -> None:
        """Read the inputs of a call and queue it. Raises UsageError, ContextExceeded, and Cancelled after `cancel`."""
        self._checked(message.id)
        done = partial(self._answer, message.id)
        job = EmbeddingJob((), done, message.dimensions, message.normalize, message.tenant)
        self._embedder.check(job, scores=message.query is not None)
        job.texts = limited(self._read(message, number) for number in range(len(message.inputs)))
        with self._lock:
            self._checked(message.id).job = job
            self._embedder.add(job)

    def _checked(self, call: int) -> _Call:
        if call not in self._calls:
            raise Cancelled("the call was cancelled")
        return self._calls[call]

    def cancel(self, call: int) -> None:
        """End a call with an error, at the latest when its inputs would be read. Unknown calls are ignored.

        Until then, the inputs need memory, so the server has to count the call.
        """
        if (job := self.forget(call)) is not None:
            self._embedder.drop(job)
            self._send(Rejected(call, Cancelled("the call was cancelled")))

    def forget(self, call: int) -> EmbeddingJob | None:
        """Forget a call, and return its job if it is queued. Unknown calls are ignored."""
        with self._lock:
            ended = self._calls.pop(call, None)
        return None if ended is None else ended.job

    def step(self) -> None:
        """Compute a few results. Call it between steps of the engine."""
        with suppress(Cancelled):  # the server is closing the engine, whose own step ends the same way
            self._embedder.step()
        with self._lock:
            calls = [(number, call, call.job) for number, call in self._calls.items() if call.job is not None]
        for number, call, job in calls:
            unsent = len(job.results) - call.n_sent
            if unsent and unsent * job.results[-1].nbytes >= _PART_BYTES:
                self._send_results(number, call, job)

    def counted(self, status: EngineStatus) -> EngineStatus:
        """Return the status of the engine with the tokens of texts among those of prompts."""
        return replace(status, prompt_tokens=status.prompt_tokens + self._tokens)

    def _read(self, message: Embed, number: int) -> list[int]:
        prompt, place, truncate = (
            message.inputs[number],
            f"{'input' if message.query is None else 'documents'}[{number}]",
            message.truncate,
        )
        if message.query is not None and isinstance(prompt, TextPrompt):
            return self._reader.pair_of(message.query, prompt.text, place, truncate=truncate)
        text = prompt.text if isinstance(prompt, TextPrompt) else prompt.tokens
        return self._reader.tokens_of(text, place, truncate=truncate)

    def _answer(self, call: int, job: EmbeddingJob) -> None:
        with self._lock:
            ended = self._calls.pop(call, None)
        self._tokens += job.tokens
        if ended is None:
            return
        if job.error is not None:
            self._send(Rejected(call, job.error))
        else:
            self._send_results(call, ended, job)

    def _send_results(self, number: int, call: _Call, job: EmbeddingJob) -> None:
        """Send the results that have not been sent."""
        first, call.n_sent = call.n_sent, len(job.results)
        data = np.stack(job.results[first:]).tobytes()
        tokens = [len(tokens) for tokens in job.texts[first : call.n_sent]]
        self._send(Embedded(number, data, tokens, is_last=call.n_sent == len(job.texts)))
