"""Tests of the loop that runs an engine for the server, without a process of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import Cancelled, LlmrunError, Overloaded, UsageError
from llmrun.base.types import Batch, FinishReason
from llmrun.engine.child import serving
from llmrun.engine.child.messages import (
    Ask,
    Beat,
    Begun,
    Cancel,
    Close,
    CountPrompt,
    Detokenize,
    Detokenized,
    FromChild,
    Note,
    Prefilling,
    PrefixExplained,
    Preparing,
    PromptCounted,
    Rejected,
    Spell,
    Spelled,
    Stepped,
    Taken,
    Tokenize,
    Tokenized,
)
from llmrun.engine.child.serving import EngineServing, Heart
from llmrun.engine.costs import EMPTY
from llmrun.engine.engine import Engine
from llmrun.engine.prefix_history import PrefixHistory
from llmrun.engine.requests import (
    ChatPrompt,
    Finished,
    PrefillProgress,
    PrefixCause,
    Request,
    TextDelta,
    TextPrompt,
    TokenPrompt,
)
from llmrun.engine.scheduling.waits import Prediction

M = TypeVar("M")
PATIENCE_S = 30.0


class Gate:
    """A backend whose steps wait until the test lets them pass."""

    def __init__(self) -> None:
        self.backend = ScriptedBackend(max_sequences=4)
        self.entered: queue.Queue[Batch] = queue.Queue()
        self.open = threading.Semaphore(0)
        self.closed = False
        run = self.backend.forward

        def forward(batch: Batch) -> object:
            if not self.closed:
                return run(batch)
            self.entered.put(batch)
            assert self.open.acquire(timeout=PATIENCE_S)
            return run(batch)

        self.backend.forward = forward  # type: ignore[assignment, method-assign]


class Server:
    """The server's side of the loop: sends messages, and waits for those that come back."""

    def __init__(self, max_wait_s: float | None = None, *, explains_prefixes: bool = False) -> None:
        self.gate = Gate()
        self.engine = Engine(self.gate.backend, on_begin=lambda ids: self.serving.report_begun(ids))
        self.messages: queue.Queue[FromChild] = queue.Queue()
        heart = Heart(lambda beat: None)
        self.serving = EngineServing(
            self.engine, self.messages.put, heart, max_wait_s, explains_prefixes=explains_prefixes
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.serving.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def ask(self, number: int, request: Request | None = None, **options: object) -> None:
        request = request or text(f"question {number}")
        self.serving.take(Ask(number, request, time.perf_counter(), **options))  # type: ignore[arg-type]

    def next(self, kind: type[M], wanted: Callable[[M], object] = lambda message: True) -> M:
        """Return the next message of a kind, and skip those before it."""
        while True:
            message = self.messages.get(timeout=PATIENCE_S)
            if isinstance(message, kind) and wanted(message):
                return message

    def end_of(self, number: int) -> Finished:
        stepped = self.next(Stepped, lambda one: any(is_end(event, number) for event in one.events))
        (end,) = [event for event in stepped.events if is_end(event, number)]
        assert isinstance(end, Finished)
        return end

    def close(self) -> None:
        self.gate.closed = False
        self.gate.open.release(1000)
        self.serving.take(Close())
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.engine.close()


def is_end(event: object, number: int) -> bool:
    return isinstance(event, Finished) and event.request_id == number


def text(prompt: str, max_tokens: int = 5) -> Request:
    return Request(TextPrompt(prompt), max_tokens=max_tokens)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_a_request_is_taken_begun_and_answered(server: Server) -> None:
    server.ask(70)
    first = [server.messages.get(timeout=PATIENCE_S) for _ in range(4)]
    preparing, taken, begun, stepped = first
    assert (preparing, taken, begun) == (Preparing(70), Taken(70, 12, 0.0), Begun((70,)))
    assert isinstance(stepped, Stepped)
    events = list(stepped.events)
    while not is_end(events[-1], 70):
        events += server.next(Stepped).events
    assert {event.request_id for event in events} == {70}
    assert sum(isinstance(event, TextDelta) for event in events) == 5
    assert isinstance(events[0], PrefillProgress)


def test_times_count_from_the_receipt(server: Server) -> None:
    server.serving.take(Ask(1, text("hello"), time.perf_counter() - 100))
    timings = server.end_of(1).timings
    assert 100 <= timings.ttft_s <= timings.total_s < 100 + PATIENCE_S


def test_begun_is_sent_before_the_step_runs(server: Server) -> None:
    server.gate.closed = True
    server.ask(1)
    assert server.next(Begun) == Begun((1,))
    server.gate.entered.get(timeout=PATIENCE_S)
    server.ask(2)
    server.next(Taken, lambda taken: taken.id == 2)
    server.gate.open.release()
    server.gate.entered.get(timeout=PATIENCE_S)
    assert server.next(Begun) == Begun((2,))


def test_progress_is_reported_during_a_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_PROGRESS_S", 0.01)
    server.engine._scheduler.costs.observe(EMPTY.with_chunk(256, 0), 256, 0.3)
    server.gate.closed = True
    server.ask(70, text("x" * 600))
    server.gate.entered.get(timeout=PATIENCE_S)
    told = [server.next(Prefilling).events[0] for _ in range(4)]
    assert {(event.request_id, event.total) for event in told} == {(70, 601)}
    assert 0 <= told[0].done < told[-1].done <= 256
    assert told[0].left_s is not None
    assert told[-1].left_s is not None
    assert 0 < told[-1].left_s < told[0].left_s


def test_the_first_step_of_a_suspect_runs_alone(server: Server) -> None:
    server.gate.closed = True
    server.ask(1)
    server.gate.entered.get(timeout=PATIENCE_S)
    server.ask(2, text("another text"), alone=True)
    server.next(Taken, lambda taken: taken.id == 2)
    batches = []
    for _ in range(2):
        server.gate.open.release()
        batches.append(server.gate.entered.get(timeout=PATIENCE_S))
    assert [len(set(batch.seq.tolist())) for batch in batches] == [1, 2]
    assert len(batches[0].tokens) > 1, "a prompt, not the next token of the other request"


@pytest.mark.parametrize("moment", ["in the queue", "in its first step", "in the middle"])
def test_a_cancelled_request_ends_after_the_step(server: Server, moment: str) -> None:
    server.gate.closed = True
    for number in range(1, 5):
        server.ask(number, text(f"{number} {'x' * 300}", 50))
        server.next(Taken)
    server.gate.entered.get(timeout=PATIENCE_S)
    cancelled = 1
    if moment == "in the queue":
        cancelled = 9
        server.ask(9)
        server.next(Taken)
    elif moment == "in the middle":
        for _ in range(8):
            server.gate.open.release()
            server.gate.entered.get(timeout=PATIENCE_S)
    server.serving.take(Cancel((cancelled, 1000)))
    server.gate.open.release()
    server.gate.entered.get(timeout=PATIENCE_S)  # the next step begins after the cancelled request has ended
    server.gate.open.release()
    end = server.end_of(cancelled)
    assert end.reason is FinishReason.CANCELLED
    assert (end.timings.generated_tokens > 0) == (moment == "in the middle")


def test_a_request_cancelled_before_it_is_prepared_never_runs(server: Server) -> None:
    busy, go_on = threading.Event(), threading.Event()
    prepare = server.engine.prepare

    def slow(request: Request) -> object:
        busy.set()
        assert go_on.wait(PATIENCE_S)
        return prepare(request)

    server.engine.prepare = slow  # type: ignore[assignment, method-assign]
    server.ask(1)
    server.ask(2)
    assert busy.wait(PATIENCE_S)
    server.serving.take(Cancel((1, 2)))
    ends = [server.next(Rejected)]  # the request in the queue does not wait for the one that is being prepared
    go_on.set()
    ends.append(server.next(Rejected))
    assert [(end.id, type(end.error)) for end in ends] == [(2, Cancelled), (1, Cancelled)]
    assert server.engine.idle


def test_invalid_requests_are_rejected_and_others_go_on(server: Server) -> None:
    server.ask(1, Request(TokenPrompt([])))
    server.ask(2, Request(TokenPrompt([10**6])))
    server.ask(3, Request(TextPrompt("x"), stop=("",)))
    server.ask(4)
    rejected = {message.id: message.error for message in (server.next(Rejected) for _ in range(3))}
    assert set(rejected) == {1, 2, 3}
    assert {type(error) for error in rejected.values()} == {UsageError}
    assert server.end_of(4).reason is FinishReason.LENGTH


def test_a_bug_in_preparing_ends_only_its_request(server: Server) -> None:
    prepare = server.engine.prepare

    def broken(request: Request) -> object:
        if request.max_tokens == 13:
            raise RecursionError("maximum depth\nexceeded")
        return prepare(request)

    server.engine.prepare = broken  # type: ignore[assignment, method-assign]
    server.ask(1, text("x", 13))
    server.ask(2)
    assert str(server.next(Rejected).error) == "request cannot be prepared: RecursionError: maximum depth exceeded"
    server.end_of(2)


def test_a_request_that_would_wait_too_long_is_refused() -> None:
    server = Server(max_wait_s=5.0)
    server.engine.predicted = lambda answer: Prediction(7.0, 9.0)  # type: ignore[method-assign]
    server.ask(1)
    error = server.next(Rejected).error
    assert isinstance(error, Overloaded)
    assert error.retry_after == 7.0
    server.ask(2, admitted=True)
    taken = server.next(Taken)
    assert (taken.wait_s, taken.first_token_s) == (7.0, 9.0)
    server.end_of(2)
    server.close()


def test_tokens_and_their_bytes(server: Server) -> None:
    server.serving.take(Tokenize(1, "é<|im_end|>", add_special=True, parse_special=True))
    assert server.next(Tokenized) == Tokenized(1, [256, 0xC3, 0xA9, 259])
    server.serving.take(Detokenize(2, [0xC3, 0xA9]))
    assert server.next(Detokenized) == Detokenized(2, "é".encode())
    server.serving.take(Spell(3, [0xC3, 0xA9, 259]))
    assert server.next(Spelled) == Spelled(3, [b"\xc3", b"\xa9", b"<|im_end|>"])
    server.serving.take(Detokenize(4, [258, 0xC3, 0xA9]))
    assert server.next(Detokenized) == Detokenized(4, "<|im_start|>é".encode())
    for number, tokens in enumerate(([-1], [260])):
        for message in (Detokenize(5 + number, tokens), Spell(7 + number, tokens)):
            server.serving.take(message)
            assert isinstance(server.next(Rejected).error, UsageError)


def test_prompts_are_counted_even_if_they_are_too_long(server: Server) -> None:
    prompt = "x" * (server.engine.info.context_size + 5)
    server.serving.take(CountPrompt(1, Request(TextPrompt(prompt))))
    assert server.next(PromptCounted) == PromptCounted(1, len(prompt) + 1)  # and the BOS
    server.serving.take(CountPrompt(2, Request(ChatPrompt([{"role": "tool", "content": "x"}]))))
    assert isinstance(server.next(Rejected).error, LlmrunError)
    assert server.engine.idle


def test_steps_report_the_state_of_the_engine(server: Server) -> None:
    server.ask(1)
    server.end_of(1)
    time.sleep(0.06)
    server.ask(2)
    beat = server.next(Stepped, lambda one: one.beat is not None).beat
    assert isinstance(beat, Beat)
    assert beat.steps >= 5
    assert beat.prompt_tokens >= 10


def test_an_error_in_a_step_ends_the_loop() -> None:
    server = Server()

    def broken(batch: Batch) -> object:
        raise ZeroDivisionError("one row")

    server.gate.backend.forward = broken  # type: ignore[assignment, method-assign]
    server.ask(1)
    server._thread.join(PATIENCE_S)
    assert isinstance(server.error, ZeroDivisionError)
    server.engine.close()


def test_an_idle_engine_returns_free_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = threading.Semaphore(0)
    monkeypatch.setattr(serving, "_IDLE_S", 0.01)
    monkeypatch.setattr(serving, "_RELEASE_S", 0.01)
    monkeypatch.setattr(Engine, "release_idle_memory", lambda engine: returned.release())
    server = Server()
    try:
        assert returned.acquire(timeout=PATIENCE_S)
        assert not returned.acquire(timeout=0.1)
        server.ask(1)
        server.end_of(1)
        assert returned.acquire(timeout=PATIENCE_S)
    finally:
        server.close()


def test_saving_before_the_end_takes_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SAVE_S", 0.05)
    monkeypatch.setattr(Engine, "save_prefix", lambda engine: True)
    server = Server()
    server.close()
    assert server.next(Note).text == "some prefixes are not saved: saving took longer than 0.05 s"


LONG = "why does the test of the parser fail on one system, although it passes on every other system?"


@pytest.fixture
def explaining() -> Iterator[Server]:
    made = Server(explains_prefixes=True)
    yield made
    made.close()


def test_requests_are_taken_with_what_they_will_reuse(explaining: Server) -> None:
    reports = []
    for number in (1, 2):
        explaining.ask(number, text(LONG))
        reports.append(explaining.next(Taken).prefix)
        explaining.end_of(number)
    assert [report and report.cause for report in reports] == [PrefixCause.FIRST, PrefixCause.REUSED]
    assert explaining.messages.empty(), "the prediction was right"


def test_a_wrong_prediction_of_reuse_is_corrected(explaining: Server) -> None:
    explaining.ask(1, text(LONG))
    explaining.end_of(1)
    explaining.gate.closed = True
    explaining.ask(2, text("x"))
    explaining.gate.entered.get(timeout=PATIENCE_S)
    explaining.ask(3, text(LONG))
    taken = explaining.next(Taken, lambda taken: taken.id == 3)
    assert taken.prefix is not None
    assert taken.prefix.reused == len(LONG)
    explaining.engine.forget()  # before the step that admits the request
    explaining.gate.closed = False
    explaining.gate.open.release()
    explained = explaining.next(PrefixExplained)
    assert (explained.id, explained.prefix.reused, explained.prefix.cause) == (3, 1, PrefixCause.EVICTED)
    assert 0 < explained.prefix.ago_s < PATIENCE_S


def test_refused_requests_are_not_waited_for(explaining: Server) -> None:
    explaining.gate.closed = True
    explaining.serving._max_wait_s = -1.0
    explaining.ask(1, text(LONG))
    explaining.next(Rejected)
    explaining.serving._max_wait_s = None
    explaining.ask(2, text(LONG))
    taken = explaining.next(Taken)
    assert taken.prefix is not None
    assert taken.prefix.cause is PrefixCause.FIRST


@pytest.mark.push
def test_remembered_prompts_have_a_limit(explaining: Server) -> None:
    """A template may leave out a long text, which then has no tokens."""
    for number in range(1, 13):
        left_out = {"role": "assistant", "content": "Yes.", "reasoning_content": "x" * (1 << 20)}
        explaining.ask(number, Request(ChatPrompt([left_out, {"role": "user", "content": "Hi"}]), max_tokens=1))
        explaining.end_of(number)
    assert explaining.serving._history is not None
    assert len(explaining.serving._history._seen) == 7


def test_a_bug_in_explaining_fails_no_request(explaining: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixHistory, "expected", lambda *given: 1 // 0)
    explaining.ask(1)
    assert "ZeroDivisionError" in explaining.next(Note).text
    assert explaining.next(Taken).prefix is None
    explaining.end_of(1)
