"""Runs an engine for the server: one thread reads messages, one prepares requests, and the main thread runs steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from llmrun.base.errors import Cancelled, LlmrunError, Overloaded, UsageError
from llmrun.base.machine.freed_memory import return_freed_memory
from llmrun.engine.child.embedding import Embedding
from llmrun.engine.child.heart import Heart
from llmrun.engine.child.messages import (
    Ask,
    Begun,
    Cancel,
    Close,
    CountPrompt,
    Detokenize,
    Detokenized,
    Embed,
    FromChild,
    Preparing,
    PromptCounted,
    Rejected,
    Stepped,
    Taken,
    ToChild,
    Tokenize,
    Tokenized,
)
from llmrun.engine.child.turns import TurnQueue
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Event, Failed, Finished

_Prepared = Ask | Tokenize | Detokenize | CountPrompt | Embed
_SAVE_S = 2.0  # how long prefixes are saved before the process ends
_IDLE_S = 1.0  # how long the engine must be idle until freed memory is returned to the system


class EngineServing:
    """Serves one engine until it is closed.

    send        sends a message to the server; thread-safe
    max_wait_s  refuse requests whose predicted wait is longer; None for no limit
    """

    # Templates and tokenizing do not run on the main thread, where they would delay the answers in progress. There is
    # only one thread for them, because the process that renders templates handles one request at a time.

    def __init__(
        self, engine: Engine, send: Callable[[FromChild], None], heart: Heart, max_wait_s: float | None
    ) -> None:
        self._engine = engine
        self._send = send
        self._heart = heart
        self._max_wait_s = max_wait_s
        self._to_prepare: TurnQueue[_Prepared] = TurnQueue()
        self._wake = threading.Condition()  # guards the fields below; notified when there is something to do
        self._engine_ids: dict[int, int | None] = {}  # the server's id -> the engine's id, or None before it has one
        self._server_ids: dict[int, int] = {}
        self._cancelled: set[int] = set()  # the server's ids of requests cancelled before they had an engine's id
        self._closing = False
        self._embedding = Embedding(engine, send, heart.expect_rows)
        self._last_wait = (0.0, 0.0)  # the last predicted wait in seconds, and when it was predicted
        self._began = False  # whether a request began in the step that is running
        threading.Thread(target=self._prepare_all, name="preparing", daemon=True).start()

    def take(self, message: ToChild) -> None:
        """Handle a message from the server without waiting for anything. Called by the reading thread."""
        match message:
            case Ask(id=request_id, request=request):
                with self._wake:
                    self._engine_ids[request_id] = None
                if message.alone:
                    self._to_prepare.put_first(message)
                else:
                    self._to_prepare.put(request.tenant, message)
            case Tokenize(tenant=tenant) | Detokenize(tenant=tenant):
                self._to_prepare.put(tenant, message)
            case Embed(id=call, tenant=tenant):
                self._embedding.expect(call)
                self._to_prepare.put(tenant, message)
            case CountPrompt(request=request):
                self._to_prepare.put(request.tenant, message)
            case Cancel(ids=ids):
                self._cancel(ids)
            case Close():
                with self._wake:
                    self._closing = True
                    self._engine.cancel_current()
                    self._wake.notify()

    def run(self) -> None:
        """Run steps until the server closes the engine. Raises the error of a step that failed."""
        while True:
            self._wait_for_work()
            if self._closing:
                self._save_prefixes()
                return
            self._heart.step_begins()
            self._embedding.step()
            events = self._engine.step()
            status, busy = self._embedding.counted(self._engine.status()), self._has_work()
            beat = self._heart.step_ended(status, busy=busy, wait_s=self._predicted_wait())
            if events or beat is not None or self._began:
                self._began = False
                self._send(Stepped(self._with_server_ids(events), beat))

    def _wait_for_work(self) -> None:
        def is_needed() -> bool:
            return self._closing or self._has_work()

        with self._wake:
            if self._wake.wait_for(is_needed, _IDLE_S):
                return
        return_freed_memory()
        while not is_needed() and self._engine.save_prefix():
            pass
        with self._wake:
            self._wake.wait_for(is_needed)

    def _has_work(self) -> bool:
        return not (self._engine.idle and self._embedding.idle)

    def _save_prefixes(self) -> None:
        """Save prefixes for up to _SAVE_S seconds before the process ends."""
        end = time.monotonic() + _SAVE_S
        while self._engine.save_prefix() and time.monotonic() < end:
            pass

    def _cancel(self, ids: Sequence[int]) -> None:
        with self._wake:
            for request_id in ids:
                self._embedding.cancel(request_id)
                engine_id = self._engine_ids.get(request_id)
                if engine_id is not None:
                    self._engine.cancel(engine_id)
                elif request_id in self._engine_ids:
                    self._cancelled.add(request_id)
            self._wake.notify()

    def _prepare_all(self) -> None:
        while True:
            message = self._to_prepare.get()
            try:
                self._prepare(message)
            except LlmrunError as error:
                self._reject(message, error)
            except Exception as error:  # noqa: BLE001 - an unforeseen input must not end the other requests
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                self._reject(message, LlmrunError(f"request cannot be prepared: {reason}"))

    def _prepare(self, message: _Prepared) -> None:
        match message:
            case Ask():
                self._enqueue(message)
            case Tokenize():
                tokens = self._engine.tokenizer.encode(
                    message.text, add_special=message.add_special, parse_special=message.parse_special
                )
                self._send(Tokenized(message.id, tokens.tolist()))
            case Detokenize():
                size = self._engine.info.vocabulary_size
                for token in message.tokens:
                    if not 0 <= token < size:
                        raise UsageError(f"no such token: tokens: {token}, the vocabulary has {size} tokens")
                self._send(Detokenized(message.id, self._engine.tokenizer.decode(message.tokens)))
            case CountPrompt():
                self._send(PromptCounted(message.id, self._engine.prompt_tokens(message.request)))
            case Embed():
                self._embedding.add(message)
                with self._wake:
                    self._wake.notify()

    def _enqueue(self, ask: Ask) -> None:
        if self._end_if_cancelled(ask.id):
            return
        self._send(Preparing(ask.id))
        answer = self._engine.prepare(ask.request)
        # Times count from the moment at which the server received the request.
        answer.submitted = min(answer.submitted, ask.received)
        wait = self._engine.predicted_wait(answer)
        self._last_wait = (wait, time.monotonic())
        if not ask.admitted and self._max_wait_s is not None and wait > self._max_wait_s:
            raise Overloaded(
                f"the server is busy: the predicted wait is {wait:.0f} s, the limit is {self._max_wait_s:g} s",
                retry_after=wait,
            )
        self._send(Taken(ask.id, answer.prompt_tokens, wait))
        with self._wake:
            if ask.id not in self._cancelled:
                self._engine_ids[ask.id] = answer.request_id
                self._server_ids[answer.request_id] = ask.id
                self._engine.enqueue(answer, alone=ask.alone)
                self._wake.notify()
        self._end_if_cancelled(ask.id)

    def _end_if_cancelled(self, request_id: int) -> bool:
        """End a request that was cancelled before the engine had it, and return whether it was."""
        with self._wake:
            if request_id not in self._cancelled:
                return False
            self._forget(request_id)
        self._send(Rejected(request_id, Cancelled("the request was cancelled before it was in the queue")))
        return True

    def _reject(self, message: _Prepared, error: LlmrunError) -> None:
        with self._wake:
            self._forget(message.id)
        self._embedding.forget(message.id)
        self._send(Rejected(message.id, error))

    def _forget(self, request_id: int) -> None:
        self._cancelled.discard(request_id)
        engine_id = self._engine_ids.pop(request_id, None)
        if engine_id is not None:
            del self._server_ids[engine_id]

    def report_begun(self, ids: Sequence[int]) -> None:
        """Tell the server which requests begin, before the step that may end this process. For `Engine.on_begin`."""
        self._began = True
        self._send(Begun(tuple(self._server_ids[engine_id] for engine_id in ids)))

    def _with_server_ids(self, events: Sequence[Event]) -> tuple[Event, ...]:
        renamed = []
        for event in events:
            request_id = self._server_ids[event.request_id]
            renamed.append(replace(event, request_id=request_id))
            if isinstance(event, Finished | Failed):
                with self._wake:
                    self._forget(request_id)
        return tuple(renamed)

    def _predicted_wait(self) -> float:
        """Return the predicted wait of a new request: the last prediction, less the time since then."""
        if self._engine.idle:
            return 0.0
        seconds, when = self._last_wait
        return max(0.0, seconds - (time.monotonic() - when))
