"""Runs an engine for the server: one thread reads messages, one prepares requests, and the main thread runs steps.

Embeddings and scores are computed between the steps. Heartbeats show the server that the engine makes progress. A queue
serves tenants round-robin, so no tenant has to wait for all the work of another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from msgspec import structs

from llmrun.base.errors import Cancelled, LlmrunError, Overloaded, UsageError
from llmrun.base.machine.memory import return_freed_memory
from llmrun.engine.base import EngineStatus
from llmrun.engine.child.messages import (
    SAVE_S,
    Ask,
    Beat,
    Begun,
    Cancel,
    ChatDescribed,
    Close,
    CountPrompt,
    DescribeChat,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    FromChild,
    Note,
    Prefilling,
    PrefixExplained,
    PrefixSaved,
    Preparing,
    PromptCounted,
    PromptRendered,
    Rejected,
    RenderPrompt,
    SavePrefix,
    Spell,
    Spelled,
    Stepped,
    Tags,
    Taken,
    ThinkingFacts,
    ToChild,
    Tokenize,
    Tokenized,
    ToolFacts,
)
from llmrun.engine.costs import MOST_ROWS
from llmrun.engine.embedding import EmbeddingJob, InputReader, limited_inputs
from llmrun.engine.engine import Engine
from llmrun.engine.images import misplaced
from llmrun.engine.prefix_history import LEAST, PrefixHistory
from llmrun.engine.requests import Event, Failed, Finished, PrefixReport, StatePlace, TextPrompt
from llmrun.engine.saved_state.one_file import SavedFile
from llmrun.model.tokenizers.text_tokenizer import decode_spelled, spelled

if TYPE_CHECKING:
    from llmrun.engine.answer import Answer

_PROGRESS_S = 0.2  # seconds between two reports of the progress of prompts, unless the reports would then take
_PROGRESS_SHARE = 0.05  # more than this share of the time
_RAREST_PROGRESS_S = 1.0
_BEAT_S = 0.5  # the longest time between two beats
_STEP_BEAT_S = 0.05  # the shortest time between two beats that follow steps
_RECENT_STEPS = 64


class Heart:
    """Sends a heartbeat at least twice a second from its own thread, and creates the heartbeats that follow steps.

    Heartbeats continue even if the engine hangs, so each one reports the figures from the end of the last step.
    """

    def __init__(self, send: Callable[[Beat], None]) -> None:
        self._send = send
        self._last = Beat(busy=False)
        self._sent = time.monotonic()
        self._step_began: float | None = None  # the time when the current step began
        self._patience = 1.0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def step_begins(self) -> None:
        """Record that a step is about to run."""
        self._step_began = time.monotonic()

    def expect_rows(self, rows: int) -> None:
        """Record that the current step runs a pass with this many rows."""
        self._patience = max(1.0, rows / MOST_ROWS)

    def step_ended(self, status: EngineStatus, *, busy: bool, wait_s: float) -> Beat | None:
        """Record the end of the step. Returns the heartbeat to send, or None if one was sent a moment ago."""
        now = time.monotonic()
        began, self._step_began, self._patience = self._step_began, None, 1.0
        self._step_seconds.append(now - (began or now))
        self._last = Beat(
            busy=busy,
            longest_step_s=max(self._step_seconds),
            wait_s=wait_s,
            steps=self._last.steps + 1,
            free_tokens=status.free_tokens,
            prompt_tokens=status.prompt_tokens,
            cached_tokens=status.cached_tokens,
            generated_tokens=status.generated_tokens,
            preemptions=status.preemptions,
        )
        if now - self._sent < _STEP_BEAT_S:
            return None
        self._sent = now
        return self._last

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            if (rest := self._sent + _BEAT_S - now) > 0:
                time.sleep(rest)
                continue
            self._sent = now
            busy = self._last.busy or self._step_began is not None
            self._send(structs.replace(self._last, busy=busy, patience=self._patience))


Item = TypeVar("Item")


class TurnQueue(Generic[Item]):
    """A thread-safe queue that serves urgent items first, and then the tenants round-robin."""

    def __init__(self) -> None:
        self._urgent: deque[Item] = deque()
        self._items: dict[str, deque[Item]] = {}  # tenants with items; the first tenant is next
        self._filled = Condition()

    def put(self, tenant: str, item: Item) -> None:
        with self._filled:
            self._items.setdefault(tenant, deque()).append(item)
            self._filled.notify()

    def put_first(self, item: Item) -> None:
        """Add an urgent item, which is served after earlier urgent items."""
        with self._filled:
            self._urgent.append(item)
            self._filled.notify()

    def get(self) -> Item:
        """Wait for an item and return it. The item's tenant then moves behind all other tenants."""
        with self._filled:
            self._filled.wait_for(lambda: self._urgent or self._items)
            if self._urgent:
                return self._urgent.popleft()
            tenant = next(iter(self._items))
            items = self._items.pop(tenant)
            item = items.popleft()
            if items:
                self._items[tenant] = items
            return item

    def drop(self, is_unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove all items for which `is_unwanted` is true, and return these items."""
        dropped: list[Item] = []
        with self._filled:
            for items in (self._urgent, *self._items.values()):
                unwanted = [item for item in items if is_unwanted(item)]
                for item in unwanted:
                    items.remove(item)
                dropped += unwanted
            self._items = {tenant: items for tenant, items in self._items.items() if items}
        return dropped


_PART_BYTES: Final = 1 << 17  # bytes of results; decoding a message of 60 MB would delay the server by a second


@dataclass(slots=True)
class _Call:
    """A call for vectors or scores that has not ended.

    job     None until the inputs have been read
    n_sent  number of results that have been sent
    """

    job: EmbeddingJob | None = None
    n_sent: int = 0


class Embedding:
    """The calls of clients that request vectors or scores.

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
        """Record that a call has arrived."""
        with self._lock:
            self._calls[call] = _Call()

    def add(self, message: Embed) -> None:
        """Read the inputs of a call and queue it. Raises UsageError, ContextExceeded, and Cancelled after `cancel`."""
        self._checked(message.id)
        done = partial(self._answer, message.id)
        job = EmbeddingJob((), done, message.dimensions, message.normalize, message.tenant)
        self._embedder.check(job, scores=message.query is not None)
        job.texts = limited_inputs(self._read(message, number) for number in range(len(message.inputs)))
        with self._lock:
            self._checked(message.id).job = job
            self._embedder.add(job)

    def _checked(self, call: int) -> _Call:
        if call not in self._calls:
            raise Cancelled("the call was cancelled")
        return self._calls[call]

    def cancel(self, call: int) -> None:
        """End a call with an error, immediately if the call is queued, otherwise in `add`. Ignores unknown calls.

        The inputs of a call occupy memory until the call ends, so the server has to count the call until then.
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
        """Compute a few results. Call this method between steps of the engine."""
        with suppress(Cancelled):  # the server is closing the engine, which also cancels the engine's step
            self._embedder.step()
        with self._lock:
            calls = [(number, call, call.job) for number, call in self._calls.items() if call.job is not None]
        for number, call, job in calls:
            unsent = len(job.results) - call.n_sent
            if unsent and unsent * job.results[-1].nbytes >= _PART_BYTES:
                self._send_results(number, call, job)

    def counted(self, status: EngineStatus) -> EngineStatus:
        """Return the status of the engine, with the tokens of embedded texts counted as prompt tokens."""
        return replace(status, prompt_tokens=status.prompt_tokens + self._tokens)

    def _read(self, message: Embed, number: int) -> list[int]:
        prompt, place, truncate = (
            message.inputs[number],
            f"{'input' if message.query is None else 'documents'}[{number}]",
            message.truncate,
        )
        if message.query is not None and isinstance(prompt, TextPrompt):
            return self._reader.pair_of(message.query, prompt.text, place, truncate=truncate)
        if isinstance(prompt, TextPrompt) and prompt.images:
            raise misplaced("texts to embed")
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
        """Send the results that have not been sent yet."""
        first, call.n_sent = call.n_sent, len(job.results)
        data = np.stack(job.results[first:]).tobytes()
        tokens = [len(tokens) for tokens in job.texts[first : call.n_sent]]
        self._send(Embedded(number, data, tokens, is_last=call.n_sent == len(job.texts)))


@dataclass(frozen=True, slots=True)
class _Begun:
    """A request that reused a different number of tokens than expected.

    id  an ID that no request has, because cancelling the request must not drop this item
    """

    answer: Answer
    request_id: int
    id: int = 0


_Prepared = _Begun | Ask | Tokenize | Detokenize | Spell | CountPrompt | RenderPrompt | DescribeChat | Embed
_CANCELLED_EARLY: Final = Cancelled("the request was cancelled before it was in the queue")
_IDLE_S = 1.0  # how long the engine must be idle until freed memory is returned to the system
_RELEASE_S = 30.0  # the same for free blocks of the KV cache, which later requests would have to allocate again


class EngineServing:
    """Serves one engine until it is closed.

    send        sends a message to the server; thread-safe
    max_wait_s  refuse requests whose predicted wait is longer; None for no limit
    explains_prefixes  as in Open
    """

    # Template rendering and tokenization do not run on the main thread, where they would delay the answers in progress.
    # There is only one thread for this work, because the process that renders templates handles one request at a time.

    def __init__(
        self,
        engine: Engine,
        send: Callable[[FromChild], None],
        heart: Heart,
        max_wait_s: float | None,
        *,
        explains_prefixes: bool = False,
    ) -> None:
        self._engine = engine
        self._explains, self._opened = explains_prefixes, time.monotonic()
        self._history: PrefixHistory | None = None  # created for the first request, because this probes the template
        self._expected: dict[int, tuple[Answer, int]] = {}  # requests in the queue, and the tokens they should reuse
        self._send = send
        self._heart = heart
        self._max_wait_s = max_wait_s
        self._to_prepare: TurnQueue[_Prepared] = TurnQueue()
        self._wake = threading.Condition()  # guards the fields below; notified when there is something to do
        self._engine_ids: dict[int, int | None] = {}  # the server's id -> the engine's id, or None if not assigned yet
        self._server_ids: dict[int, int] = {}
        self._cancelled: set[int] = set()  # the server's ids of requests cancelled before they had an engine's id
        self._closing = False
        self._to_save: list[SavePrefix] = []
        # A file is forgotten when the cache no longer holds any state that might be saved in it.
        self._files: WeakValueDictionary[StatePlace, SavedFile] = WeakValueDictionary()
        self._embedding = Embedding(engine, send, heart.expect_rows)
        self._last_wait = (0.0, 0.0)  # the last predicted wait in seconds, and when it was predicted
        self._began = False  # True if a request began in the current step
        self._runs = threading.Event()  # set while the engine has work
        threading.Thread(target=self._prepare_all, name="preparing", daemon=True).start()
        threading.Thread(target=self._report_progress, name="progress", daemon=True).start()

    def take(self, message: ToChild) -> None:
        """Handle a message from the server without blocking. The reading thread calls this method."""
        match message:
            case Ask(id=request_id, request=request):
                with self._wake:
                    self._engine_ids[request_id] = None
                if message.alone:
                    self._to_prepare.put_first(message)
                else:
                    self._to_prepare.put(request.tenant, message)
            case (
                Tokenize(tenant=tenant) | Detokenize(tenant=tenant) | Spell(tenant=tenant) | DescribeChat(tenant=tenant)
            ):
                self._to_prepare.put(tenant, message)
            case Embed(id=call, tenant=tenant):
                self._embedding.expect(call)
                self._to_prepare.put(tenant, message)
            case CountPrompt(request=request) | RenderPrompt(request=request):
                self._to_prepare.put(request.tenant, message)
            case SavePrefix():
                with self._wake:
                    self._to_save.append(message)
                    self._wake.notify()
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
            with self._wake:
                to_save, self._to_save = self._to_save, []
            if self._closing:
                if not self._engine.idle:
                    self._engine.step()  # ends the cancelled requests, whose prefixes could not be saved otherwise
                self._save_asked(to_save)
                self._save_prefixes()
                return
            self._runs.set()
            self._heart.step_begins()
            self._embedding.step()
            events = self._engine.step()
            self._save_asked(to_save)  # after the step, which ends the requests that clients cancelled earlier
            status, busy = self._embedding.counted(self._engine.status()), self._has_work()
            beat = self._heart.step_ended(status, busy=busy, wait_s=self._predicted_wait())
            if events or beat is not None or self._began:
                self._began = False
                self._send(Stepped(self._with_server_ids(events), beat))

    def _wait_for_work(self) -> None:
        def is_needed() -> bool:
            return self._closing or bool(self._to_save) or self._has_work()

        with self._wake:
            if is_needed():
                return
            self._runs.clear()
            if self._wake.wait_for(is_needed, _IDLE_S):
                return
        return_freed_memory()
        self._engine.keep_costs()
        while not is_needed() and self._engine.save_prefix():
            pass
        with self._wake:
            if self._wake.wait_for(is_needed, _RELEASE_S):
                return
        self._engine.release_idle_memory()
        with self._wake:
            self._wake.wait_for(is_needed)

    def _has_work(self) -> bool:
        return not (self._engine.idle and self._embedding.idle)

    def _save_asked(self, asked: Sequence[SavePrefix]) -> None:
        for message in asked:
            if (file := self._files.get(message.place)) is not None:
                self._engine.save_prefix(message.most, file)
            self._send(PrefixSaved(message.id))

    def _file(self, place: StatePlace) -> SavedFile:
        if (file := self._files.get(place)) is None:
            file = SavedFile(place, self._engine.state_key, lambda words: self._send(Note(words, id=place.client)))
            self._files[place] = file
        return file

    def _save_prefixes(self) -> None:
        """Save prefixes before the process ends, for at most SAVE_S seconds."""
        end = time.monotonic() + SAVE_S
        while self._engine.save_prefix():
            if time.monotonic() >= end:
                self._send(Note(f"some prefixes are not saved: saving took longer than {SAVE_S:g} s"))
                return

    def _cancel(self, ids: Sequence[int]) -> None:
        for message in self._to_prepare.drop(lambda message: message.id in ids):
            self._reject(message, _CANCELLED_EARLY)
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
            case _Begun():
                self._explain_begun(message.answer, message.request_id)
            case Ask():
                self._enqueue(message)
            case Tokenize():
                tokens = self._engine.tokenizer.encode(
                    message.text, add_special=message.add_special, parse_special=message.parse_special
                )
                self._send(Tokenized(message.id, tokens.tolist()))
            case Detokenize():
                self._check_tokens(message.tokens)
                self._send(Detokenized(message.id, decode_spelled(self._engine.tokenizer, message.tokens)))
            case Spell():
                self._check_tokens(message.tokens)
                self._send(Spelled(message.id, [spelled(self._engine.tokenizer, token) for token in message.tokens]))
            case CountPrompt():
                self._send(PromptCounted(message.id, self._engine.prompt_tokens(message.request)))
            case RenderPrompt():
                self._send(PromptRendered(message.id, self._engine.render_prompt(message.request)))
            case DescribeChat():
                self._send(ChatDescribed(message.id, *_chat_facts(self._engine)))
            case Embed():
                self._embedding.add(message)
                with self._wake:
                    self._wake.notify()

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        size = self._engine.info.vocabulary_size
        for token in tokens:
            if not 0 <= token < size:
                raise UsageError(f"no such token: tokens: {token}, the vocabulary has {size} tokens")

    def _enqueue(self, ask: Ask) -> None:
        if self._end_if_cancelled(ask.id):
            return
        self._send(Preparing(ask.id))
        answer = self._engine.prepare(ask.request)
        # Times are measured from the moment when the server received the request.
        answer.submitted = min(answer.submitted, ask.received)
        if ask.place is not None:
            answer.saved = self._file(ask.place)
        wait, first_token_s = self._engine.predicted(answer)
        self._last_wait = (wait, time.monotonic())
        if not ask.admitted and self._max_wait_s is not None and wait > self._max_wait_s:
            raise Overloaded(
                f"the server is busy: the predicted wait is {wait:.0f} s, the limit is {self._max_wait_s:g} s",
                retry_after=wait,
            )
        report = self._explained(answer)
        images = () if answer.images is None else tuple(image.seen for image in answer.images.images)
        self._send(Taken(ask.id, answer.prompt_tokens, wait, first_token_s, report, images))
        with self._wake:
            if ask.id not in self._cancelled:
                if report is not None:
                    self._expected[answer.request_id] = answer, report.reused
                self._engine_ids[ask.id] = answer.request_id
                self._server_ids[answer.request_id] = ask.id
                self._engine.enqueue(answer, alone=ask.alone)
                self._wake.notify()
        if not self._end_if_cancelled(ask.id) and self._history is not None:
            self._unless_bug(partial(self._history.add, answer))

    def _explained(self, answer: Answer) -> PrefixReport | None:
        """Return how much of a prompt will probably be reused, or None if prefixes are not explained."""
        if not self._explains:
            return None
        if self._history is None:
            engine, opened = self._engine, self._opened
            style = engine.thinking.style
            self._history = PrefixHistory(engine.tokenizer, engine.drops, style, key=engine.info.path, opened=opened)
        return self._unless_bug(partial(self._history.expected, answer))

    def _explain_begun(self, answer: Answer, request_id: int) -> None:
        """Correct the report about a request that has reused a different number of tokens than expected."""
        history, reused = self._history, answer.cached_tokens
        if history is None or reused is None:
            return
        explain = partial(history.explained, answer, reused, waits=answer.has_waited, found=answer.found_tokens)
        if (report := self._unless_bug(explain)) is not None:
            self._send(PrefixExplained(request_id, report))

    def _unless_bug(self, explain: Callable[[], Item]) -> Item | None:
        """Return the result, or report a bug and return None, because a bug in explanations must not fail requests."""
        try:
            return explain()
        except Exception as error:  # noqa: BLE001
            self._send(Note(f"reused prefix cannot be explained: {type(error).__name__}: {error}"))
            return None

    def _end_if_cancelled(self, request_id: int) -> bool:
        """End a request if it was cancelled before it reached the engine, and return whether it was cancelled."""
        with self._wake:
            if request_id not in self._cancelled:
                return False
            self._forget(request_id)
        self._send(Rejected(request_id, _CANCELLED_EARLY))
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
            self._expected.pop(engine_id, None)

    def report_begun(self, ids: Sequence[int]) -> None:
        """Report to the server which requests begin in the next step, which may crash this process (`on_begin`)."""
        self._began = True
        for engine_id in ids:
            answer, expected = self._expected.pop(engine_id, (None, 0))
            if answer is not None and abs((answer.cached_tokens or 0) - expected) >= LEAST:
                self._to_prepare.put_first(_Begun(answer, self._server_ids[engine_id]))
        self._send(Begun(tuple(self._server_ids[engine_id] for engine_id in ids)))

    def _with_server_ids(self, events: Sequence[Event]) -> tuple[Event, ...]:
        renamed = []
        for event in events:
            request_id = self._server_ids[event.request_id]
            renamed.append(structs.replace(event, request_id=request_id))
            if isinstance(event, Finished | Failed):
                with self._wake:
                    self._forget(request_id)
        return tuple(renamed)

    def _report_progress(self) -> None:
        """Report the progress of prompts, even during a long step, in which the kernels release the GIL."""
        taken_s = 0.0  # what the last report cost; with dozens of prompts, predicting their ends takes 30 ms
        while True:
            self._runs.wait()
            time.sleep(min(max(_PROGRESS_S, taken_s / _PROGRESS_SHARE), _RAREST_PROGRESS_S))
            began = time.thread_time()
            known = [(self._server_ids.get(event.request_id), event) for event in self._engine.prefill_progress()]
            found = [structs.replace(event, request_id=its_id) for its_id, event in known if its_id is not None]
            if found:
                self._send(Prefilling(tuple(found)))
            taken_s = time.thread_time() - began

    def _predicted_wait(self) -> float:
        """Return the predicted wait of a new request: the last prediction, minus the time since that prediction."""
        if self._engine.idle:
            return 0.0
        seconds, when = self._last_wait
        return max(0.0, seconds - (time.monotonic() - when))


def _chat_facts(engine: Engine) -> tuple[ThinkingFacts, ToolFacts]:
    style, tools = engine.thinking.style, engine.tools
    tags = None if style is None else Tags(style.opening, style.closing)
    return ThinkingFacts(tags, engine.thinking.has_switch), ToolFacts(tools.takes_tools, tools.reads_calls)
