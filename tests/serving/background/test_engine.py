"""Tests of the client of a background engine, which here is a thread that answers and ends as a test prescribes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import Cancelled, DoesNotFit, LlmrunError, UsageError
from llmrun.base.processes.frames import framed, read_frame
from llmrun.base.types import FinishReason
from llmrun.engine.child.messages import (
    FROM_CHILD,
    LONGEST,
    TO_CHILD,
    Ask,
    Cancel,
    ChatDescribed,
    CountPrompt,
    DescribeChat,
    FromChild,
    PromptCounted,
    Rejected,
    Stepped,
    Taken,
    ThinkingFacts,
    ToChild,
    ToolFacts,
    cancelled_unbegun,
)
from llmrun.engine.engine import Engine
from llmrun.engine.requests import (
    Event,
    Failed,
    Finished,
    ImageProgress,
    PrefillProgress,
    Request,
    StatePlace,
    TextDelta,
    TextPrompt,
)
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.background.engine import BackgroundEngine
from llmrun.serving.background.handshake import BackgroundFacts
from llmrun.serving.background.joining import Joined, Link

FOREVER = 1 << 30
PATIENCE_S = 10.0
NOTE = "the background engine ended unexpectedly, so this process continues the answer itself"


def text(seed: int = 1, n_tokens: int = 6) -> Request:
    """Return a request whose answer depends only on the seed."""
    sampling = SamplingParams(temperature=100.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    return Request(TextPrompt("Once upon a time"), max_tokens=n_tokens, sampling=sampling)


def cold(request: Request) -> list[Event]:
    """Return what an engine in this process answers."""
    with Engine(ScriptedBackend()) as engine:
        return list(engine.generate(request))


def shown(events: Sequence[Event]) -> list[Any]:
    """Return the events without times, without progress, and with the same id for all requests."""
    without_times: list[Any] = []
    for event in events:
        if isinstance(event, Finished):
            without_times.append((event.reason, event.timings.generated_tokens, event.timings.prompt_tokens))
        elif not isinstance(event, PrefillProgress):
            without_times.append(structs.replace(event, request_id=0))
    return without_times


class FakeDaemon:
    """A background engine that ends after some messages.

    n_messages  the number of messages that it sends
    batch       the number of events in a message
    holds       True if it answers nothing after Taken until a request is cancelled
    """

    def __init__(
        self,
        n_messages: int = FOREVER,
        *,
        batch: int = 1,
        holds: bool = False,
        answers: Callable[[ToChild], list[FromChild]] | None = None,
    ) -> None:
        self.received: list[ToChild] = []
        self._left, self._batch, self._holds = n_messages, batch, holds
        self._answers = answers or self._usual_answers
        self._ours, theirs = socket.socketpair()
        with Engine(ScriptedBackend()) as engine:
            info = replace(engine.info, metadata={})
        facts = BackgroundFacts("a-model", info, 100, True, False, False, SamplingParams(), 3.5)
        self.joined = Joined(Link.of(theirs), 4242, 1 << 32, facts)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def asked(self) -> list[Ask]:
        return [message for message in self.received if isinstance(message, Ask)]

    @property
    def cancelled(self) -> list[int]:
        return [each for message in self.received if isinstance(message, Cancel) for each in message.ids]

    def wait(self) -> None:
        """Wait until the connection is closed."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError), self._ours, self._ours.makefile("rb") as stream:
            while (frame := self._frame(stream)) is not None:
                self.received.append(TO_CHILD.decode(frame))
                for answer in self._answers(self.received[-1]):
                    if self._left <= 0:
                        return
                    self._left -= 1
                    self._ours.sendall(framed(FROM_CHILD.encode(answer)))

    def _frame(self, stream: Any) -> bytes | None:
        return read_frame(stream, LONGEST) if self._left > 0 else None

    def _usual_answers(self, message: ToChild) -> list[FromChild]:
        match message:
            case Ask(id=engine_id, request=request):
                taken = Taken(engine_id, 4, 0.0)
                events = tuple(structs.replace(event, request_id=engine_id) for event in cold(request))
                batches = [events[at : at + self._batch] for at in range(0, len(events), self._batch)]
                return [taken] if self._holds else [taken, *map(Stepped, batches)]
            case Cancel(ids=ids):
                return [Stepped(tuple(map(cancelled_unbegun, ids)))]
            case DescribeChat(id=call):
                return [ChatDescribed(call, ThinkingFacts(has_switch=True), ToolFacts(takes_tools=True))]
            case CountPrompt(id=call):
                return [PromptCounted(call, 999)]
        return []


class Client:
    """A BackgroundEngine that records what it does when an engine has ended."""

    def __init__(self, first: FakeDaemon, *others: FakeDaemon, opens: Callable[[], Any] | None = None) -> None:
        self.notes: list[str] = []
        self.n_opened = 0
        self.n_rejoined = 0
        self._others = [*others]
        self._opens = opens or (lambda: Engine(ScriptedBackend(max_sequences=4)))
        self.engine = BackgroundEngine(
            first.joined, was_started=False, rejoin=self._rejoin, open_here=self._open, note=self.notes.append
        )

    def _rejoin(self) -> tuple[Joined, bool] | None:
        self.n_rejoined += 1
        return (self._others.pop(0).joined, True) if self._others else None

    def _open(self) -> Any:
        self.n_opened += 1
        return self._opens()


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(*daemons: FakeDaemon, **options: Any) -> Client:
        made.append(Client(*daemons, **options))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


def all_events(engine: BackgroundEngine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    return events


MESSAGES = 1 + len(cold(text()))  # Taken, and one for each event


def test_answers_are_those_of_an_engine_here(client: Callable[..., Client]) -> None:
    used = client(FakeDaemon())
    for seed in (1, 2):
        assert shown(list(used.engine.generate(text(seed)))) == shown(cold(text(seed)))
    assert (used.notes, used.n_opened, used.n_rejoined) == ([], 0, 0)


@pytest.mark.parametrize("sees_images", [True, False])
def test_clients_know_whether_an_engine_reads_images(client: Callable[..., Client], sees_images: bool) -> None:
    daemon = FakeDaemon()
    daemon.joined = replace(daemon.joined, facts=structs.replace(daemon.joined.facts, sees_images=sees_images))
    assert client(daemon).engine.sees_images is sees_images


def test_events_have_the_ids_of_the_client(client: Callable[..., Client]) -> None:
    used = client(FakeDaemon())
    numbers = [used.engine.submit(text(seed)) for seed in (1, 2, 3)]
    events = all_events(used.engine)
    for number, seed in zip(numbers, (1, 2, 3), strict=True):
        assert shown([event for event in events if event.request_id == number]) == shown(cold(text(seed)))


def test_an_engine_that_was_joined_was_not_loaded(client: Callable[..., Client]) -> None:
    *_, finished = client(FakeDaemon()).engine.generate(text())
    assert isinstance(finished, Finished)
    assert finished.timings.load_s == 0.0


@pytest.mark.parametrize("n_messages", range(1, MESSAGES))
def test_a_crash_after_any_message_is_invisible_but_for_one_note(
    n_messages: int, client: Callable[..., Client]
) -> None:
    used = client(FakeDaemon(n_messages))
    assert shown(list(used.engine.generate(text()))) == shown(cold(text()))
    assert used.notes == [NOTE]
    assert (used.n_opened, used.n_rejoined) == (1, 0)
    assert shown(list(used.engine.generate(text(2)))) == shown(cold(text(2)))
    assert used.notes == [NOTE]


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_replay_may_group_events_differently(batch: int, client: Callable[..., Client]) -> None:
    used = client(FakeDaemon(3, batch=batch))
    assert shown(list(used.engine.generate(text(n_tokens=20)))) == shown(cold(text(n_tokens=20)))
    assert used.notes == [NOTE]


def test_all_unfinished_requests_are_repeated(client: Callable[..., Client]) -> None:
    def answers(message: ToChild) -> list[FromChild]:
        assert isinstance(message, Ask)
        events = [structs.replace(event, request_id=message.id) for event in cold(message.request)]
        return [Taken(message.id, 4, 0.0), Stepped((events[0],)), Stepped((events[1],))]

    used = client(FakeDaemon(9, answers=answers))
    numbers = [used.engine.submit(text(seed)) for seed in (1, 2, 3)]
    events = all_events(used.engine)
    for number, seed in zip(numbers, (1, 2, 3), strict=True):
        assert shown([event for event in events if event.request_id == number]) == shown(cold(text(seed)))
    assert used.notes == [NOTE]


def test_a_replay_that_differs_is_an_error(client: Callable[..., Client]) -> None:
    def other_answers(message: ToChild) -> list[FromChild]:
        assert isinstance(message, Ask)
        events = [structs.replace(event, request_id=message.id) for event in cold(text(2))]
        return [Taken(message.id, 4, 0.0), *(Stepped((event,)) for event in events)]

    used = client(FakeDaemon(5, answers=other_answers))
    with pytest.raises(LlmrunError, match="the repeated answer differs from the part already shown"):
        list(used.engine.generate(text(1)))
    assert shown(list(used.engine.generate(text(3)))) == shown(cold(text(3)))


def test_a_replay_that_is_too_short_is_an_error(client: Callable[..., Client]) -> None:
    def long_answers(message: ToChild) -> list[FromChild]:
        assert isinstance(message, Ask)
        events = [structs.replace(event, request_id=message.id) for event in cold(text(1, 20))]
        return [Taken(message.id, 4, 0.0), *(Stepped((event,)) for event in events)]

    used = client(FakeDaemon(15, answers=long_answers))
    with pytest.raises(LlmrunError, match="the repeated answer differs"):
        list(used.engine.generate(text(1, 4)))


def test_an_engine_that_left_is_replaced_without_a_note(client: Callable[..., Client]) -> None:
    second = FakeDaemon()
    used = client(FakeDaemon(MESSAGES), second)
    first = list(used.engine.generate(text()))
    after = list(used.engine.generate(text(2)))
    assert shown(first) == shown(cold(text()))
    assert shown(after) == shown(cold(text(2)))
    assert (used.notes, used.n_opened, used.n_rejoined) == ([], 0, 1)
    assert isinstance(after[-1], Finished)
    assert after[-1].timings.load_s == 3.5  # this client has started the second engine


def test_a_request_that_ends_engines_ends_only_two(client: Callable[..., Client]) -> None:
    daemons = [FakeDaemon(0) for _ in range(5)]
    used = client(*daemons)
    assert shown(list(used.engine.generate(text()))) == shown(cold(text()))
    assert (used.n_rejoined, used.n_opened) == (1, 1)


def test_a_call_that_ends_engines_ends_only_two(client: Callable[..., Client]) -> None:
    used = client(*(FakeDaemon(0) for _ in range(5)))
    assert used.engine.prompt_tokens(text()) == 17
    assert (used.n_rejoined, used.n_opened) == (1, 1)


def test_without_an_engine_to_join_the_model_is_opened_here(client: Callable[..., Client]) -> None:
    used = client(FakeDaemon(0))
    assert shown(list(used.engine.generate(text()))) == shown(cold(text()))
    assert (used.notes, used.n_rejoined, used.n_opened) == ([], 1, 1)


def test_an_error_while_opening_the_model_is_raised(client: Callable[..., Client]) -> None:
    def opens() -> Any:
        raise DoesNotFit("no room")

    used = client(FakeDaemon(2), opens=opens)
    with pytest.raises(DoesNotFit):
        list(used.engine.generate(text()))
    assert used.engine.idle


def test_an_error_while_a_request_is_repeated_ends_that_request(client: Callable[..., Client]) -> None:
    class Refusing(Engine):
        def submit(self, request: Request) -> int:
            if request.sampling.seed == 2:
                raise UsageError("seed 2 is refused")
            return super().submit(request)

    def answers(message: ToChild) -> list[FromChild]:
        return [Taken(message.id, 4, 0.0)] if isinstance(message, Ask) else []

    used = client(FakeDaemon(2, answers=answers), opens=lambda: Refusing(ScriptedBackend(max_sequences=4)))
    numbers = [used.engine.submit(text(seed)) for seed in (1, 2)]
    events = all_events(used.engine)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.request_id, str(event.error)) for event in failed] == [(numbers[1], "seed 2 is refused")]
    assert shown([event for event in events if event.request_id == numbers[0]]) == shown(cold(text(1)))


def test_an_invalid_request_is_an_error_of_submit(client: Callable[..., Client]) -> None:
    def answers(message: ToChild) -> list[FromChild]:
        assert isinstance(message, Ask)
        return [Rejected(message.id, UsageError("too long"))]

    used = client(FakeDaemon(answers=answers))
    with pytest.raises(UsageError, match="too long"):
        used.engine.submit(text())
    assert used.engine.idle


def test_a_cancelled_answer_ends_like_one_here(client: Callable[..., Client]) -> None:
    daemon = FakeDaemon(holds=True)
    used = client(daemon)
    used.engine.submit(text())
    used.engine.cancel_current()
    (finished,) = all_events(used.engine)
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED
    assert daemon.cancelled == [daemon.asked[0].id]


def test_a_request_that_is_cancelled_early_ends_without_an_error(client: Callable[..., Client]) -> None:
    """Ctrl-C while the engine prepares a prompt: an engine in this process would report the end, too."""

    def answers(message: ToChild) -> list[FromChild]:
        if isinstance(message, Ask):
            used.engine.cancel_current()  # as a signal handler would, in the middle of `submit`
            return []
        assert isinstance(message, Cancel)
        return [Rejected(message.ids[0], Cancelled("cancelled"))]

    used = client(FakeDaemon(answers=answers))
    (finished,) = list(used.engine.generate(text()))
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED


def test_ctrl_c_before_the_request_is_sent_follows_the_request(
    client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines ignore cancellations of requests that they do not have yet."""
    daemon = FakeDaemon(holds=True)
    used = client(daemon)

    def replaced(struct: Any, **changes: Any) -> Any:
        if isinstance(struct, StatePlace):
            used.engine.cancel_current()  # as a signal handler would, just before the request is sent
        return original(struct, **changes)

    original = structs.replace
    used.engine.use_state(StatePlace("/nowhere"), lambda words: None)
    monkeypatch.setattr(structs, "replace", replaced)
    used.engine.submit(text(n_tokens=1000))
    monkeypatch.undo()
    events = all_events(used.engine)
    assert [type(event) for event in events if not isinstance(event, PrefillProgress)] == [Finished]
    assert [type(message) for message in daemon.received] == [Ask, Cancel]


def test_a_cancelled_answer_is_not_repeated(client: Callable[..., Client]) -> None:
    """The engine may end after Ctrl-C. Opening the model takes seconds, for nothing."""
    used = client(FakeDaemon(2))
    events = []
    for event in used.engine.generate(text()):
        events.append(event)
        used.engine.cancel_current()
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.CANCELLED
    assert (used.n_opened, used.n_rejoined, used.notes) == (0, 0, [])
    assert shown(list(used.engine.generate(text(2)))) == shown(cold(text(2)))


def test_ctrl_c_while_the_model_is_opened_ends_the_answer(client: Callable[..., Client]) -> None:
    def opens() -> Engine:
        used.engine.cancel_current()
        return Engine(ScriptedBackend())

    used = client(FakeDaemon(3), opens=opens)
    events = list(used.engine.generate(text()))
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.CANCELLED
    assert len([event for event in events if isinstance(event, TextDelta)]) <= 2


def test_ctrl_c_while_a_message_is_sent_waits_for_its_end(client: Callable[..., Client]) -> None:
    """The handler must not send a frame in the middle of another frame."""
    daemon = FakeDaemon(holds=True)
    used = client(daemon)
    connection = daemon.joined.link.connection
    sent: list[bytes] = []

    class Interrupted:
        def sendall(self, data: bytes) -> None:
            if not sent:
                sent.append(data[:10])
                connection.sendall(data[:10])
                used.engine.cancel_current()
                data = data[10:]
            connection.sendall(data)

        def close(self) -> None:
            connection.close()

    used.engine._link = Link(Interrupted(), daemon.joined.link.stream)  # type: ignore[arg-type]
    (finished,) = list(used.engine.generate(text()))
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED
    assert daemon.cancelled == [daemon.asked[0].id]


def test_ctrl_c_while_a_message_is_read_keeps_no_half_frame(client: Callable[..., Client]) -> None:
    first, second = FakeDaemon(), FakeDaemon()
    used = client(first, second)
    stream = first.joined.link.stream

    class Interrupting:
        def read(self, size: int) -> bytes:
            stream.read(3)
            raise KeyboardInterrupt

        def close(self) -> None:
            stream.close()

    used.engine._link = Link(first.joined.link.connection, Interrupting())
    with pytest.raises(KeyboardInterrupt):
        list(used.engine.generate(text()))
    assert shown(list(used.engine.generate(text(2)))) == shown(cold(text(2)))
    assert (used.n_rejoined, used.notes) == (1, [])
    first.wait()


def test_closing_an_answer_early_cancels_it(client: Callable[..., Client]) -> None:
    daemon = FakeDaemon()
    used = client(daemon)
    answer = used.engine.generate(text())
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert used.engine.idle
    assert shown(list(used.engine.generate(text(2)))) == shown(cold(text(2)))
    assert daemon.cancelled == [daemon.asked[0].id]


def test_the_end_of_the_client_closes_the_connection(client: Callable[..., Client]) -> None:
    daemon = FakeDaemon(holds=True)
    used = client(daemon)
    used.engine.submit(text())
    used.engine.close()
    used.engine.close()
    daemon.wait()


def test_descriptions_come_from_the_engine(client: Callable[..., Client]) -> None:
    used = client(FakeDaemon())
    assert used.engine.thinking is not None
    assert used.engine.thinking.can_think
    assert used.engine.tools is not None
    assert used.engine.tools.takes_tools
    assert used.engine.prompt_tokens(text()) == 999


def test_a_call_during_an_answer_loses_no_events(client: Callable[..., Client]) -> None:
    used = client(FakeDaemon())
    answer = used.engine.generate(text())
    events = [next(answer)]
    assert used.engine.prompt_tokens(text()) == 999
    assert shown([*events, *answer]) == shown(cold(text()))


def test_a_message_that_nobody_understands_counts_as_the_end(client: Callable[..., Client]) -> None:
    daemon = FakeDaemon(holds=True)
    used = client(daemon)
    used.engine.submit(text())
    daemon._ours.sendall(framed(b"\xff\xff"))
    assert shown(all_events(used.engine)) == shown(cold(text()))
    assert used.notes == [NOTE]


@pytest.mark.parametrize("image", [None, ImageProgress(1, 2, 0.4, 7.0)])
def test_progress_is_shown_until_the_answer_begins(client: Callable[..., Client], image: ImageProgress | None) -> None:
    def answers(message: ToChild) -> list[FromChild]:
        assert isinstance(message, Ask)
        progress = PrefillProgress(message.id, 5, 10, image=image)
        events = [structs.replace(event, request_id=message.id) for event in cold(message.request)]
        return [Taken(message.id, 4, 0.0), Stepped((progress,)), *(Stepped((event,)) for event in events)]

    used = client(FakeDaemon(answers=answers))
    number = used.engine.submit(text())
    used.engine.step()
    assert [(event.request_id, event.image) for event in used.engine.prefill_progress()] == [(number, image)]
    all_events(used.engine)
    assert used.engine.prefill_progress() == []
