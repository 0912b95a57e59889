"""Tests of requests answered by a server: the same events and timings as a local engine, and none lost."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.base.errors import NetworkError, UsageError
from llmrun.base.types import FinishReason
from llmrun.cli.answers.answering import CollectedCalls
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.engine import Engine
from llmrun.engine.remote.client import RemoteModel
from llmrun.engine.remote.engine import RemoteEngine
from llmrun.engine.remote.request import parse_endpoint
from llmrun.engine.requests import (
    ChatPrompt,
    Event,
    Failed,
    FillPrompt,
    Finished,
    ImageProgress,
    PrefillProgress,
    Prompt,
    Request,
    TextDelta,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolCallDelta,
)
from llmrun.options.sampling_params import SamplingParams
from tests.support.models.downloads import smollm2
from tests.support.servers.hostile_server import (
    DONE,
    HELLO,
    Asked,
    HangUp,
    HostileServer,
    counted,
    response,
    said,
    serving,
    stream_head,
    wait_for_hang_up,
)
from tests.support.servers.llama_server import llama_server
from tests.support.servers.tcp_relay import relay_to

pytestmark = pytest.mark.push

CHAT = ChatPrompt([{"role": "user", "content": "Say hello."}])
GREEDY = SamplingParams(temperature=0.0)


def chat(**options: Any) -> Request:
    return Request(CHAT, **options)


def answer_of(server: HostileServer, request: Request, **options: Any) -> tuple[str, list[Event]]:
    with RemoteEngine.open(server.url, **options) as engine:
        events = list(engine.generate(request))
    return "".join(event.text for event in events if isinstance(event, TextDelta)), events


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


# --- an answer


def test_an_answer_ends_with_what_the_server_counted() -> None:
    with serving(response(HELLO)) as server:
        text, events = answer_of(server, chat())
    end = finished(events)
    assert (text, end.reason, end.context_used) == ("Hello", FinishReason.STOP, 10)
    timings = end.timings
    assert (timings.prompt_tokens, timings.cached_tokens, timings.generated_tokens) == (7, 2, 3)


def test_times_are_those_at_which_the_pieces_arrived() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        time.sleep(0.2)
        connection.sendall(stream_head() + said("", role="assistant"))
        for text in ("a", "b", "c"):
            time.sleep(0.1)
            connection.sendall(said(text))
        time.sleep(1.0)
        connection.sendall(said(finish="length") + counted(5, 9) + DONE)
        wait_for_hang_up(server, connection)

    with serving(script) as server:
        started = time.monotonic()
        _, events = answer_of(server, chat())
        taken = time.monotonic() - started
    timings = finished(events).timings
    assert finished(events).reason is FinishReason.LENGTH
    assert timings.ttft_s == timings.prefill_s >= 0.29  # excludes the empty first event
    assert 0 < timings.decode_s <= taken - timings.ttft_s - 0.5  # excludes the events after the text
    assert timings.total_s == pytest.approx(timings.ttft_s + timings.decode_s)
    assert sum(timings.gaps_s) == pytest.approx(timings.decode_s)
    assert (len(timings.gaps_s), timings.generated_tokens) == (2, 9)  # a piece may be several tokens
    assert timings.tpot_s == pytest.approx(timings.decode_s / 8)
    assert timings.decode_per_second == pytest.approx(8 / timings.decode_s)


def test_without_usage_pieces_are_counted() -> None:
    with serving(response(said("a") + said("b") + said(finish="stop") + DONE)) as server:
        timings = finished(answer_of(server, chat())[1]).timings
    assert (timings.prompt_tokens, timings.generated_tokens, timings.prompt_per_second) == (0, 2, 0.0)


def test_an_answer_without_a_word_has_the_token_that_ended_it() -> None:
    with serving(response(said("", "stop") + counted(5, 1) + DONE)) as server:
        text, events = answer_of(server, chat())
    timings = finished(events).timings
    assert (text, timings.generated_tokens) == ("", 1)
    assert timings.ttft_s > 0


def test_reasoning_is_no_part_of_the_answer_but_counts_as_its_beginning() -> None:
    seen = threading.Event()

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head() + said(reasoning_content="hm"))
        assert seen.wait(60)
        time.sleep(0.2)
        connection.sendall(said("yes") + said(finish="stop") + DONE)
        wait_for_hang_up(server, connection)

    pieces: list[tuple[str, str]] = []
    with serving(script) as server, RemoteEngine.open(server.url) as engine:
        for event in engine.generate(chat()):
            if isinstance(event, TextDelta):
                pieces.append((event.reasoning, event.text))
                seen.set()
    assert pieces == [("hm", ""), ("", "yes")]
    assert isinstance(event, Finished)
    assert event.timings.decode_s > 0.19  # counts from the start of the reasoning


def test_a_person_who_waits_is_told_that_nothing_has_come() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        time.sleep(0.7)
        connection.sendall(response(HELLO))

    with serving(script) as server:
        _, events = answer_of(server, chat())
    assert events[:2] == [PrefillProgress(0, 0, 0)] * 2


def test_comments_tell_how_far_the_prompt_is() -> None:
    """llmrun servers send these comments unasked, so requests to other servers contain no unknown field."""
    comments = b": ping\n\n: processing prompt 4096/18826\n\n: processing prompt x/9\n\n"

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head() + comments)
        time.sleep(0.7)
        connection.sendall(HELLO)
        raise HangUp

    with serving(script) as server:
        text, events = answer_of(server, chat())
    assert (text, events[1]) == ("Hello", PrefillProgress(0, 4096, 18826))
    assert b"return_progress" not in server.asked[0].content


def test_comments_tell_how_long_an_image_takes() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head() + b": reading image 1 of 2: 40%, about 7 s left\n\n")
        time.sleep(0.7)
        connection.sendall(HELLO)
        raise HangUp

    with serving(script) as server:
        text, events = answer_of(server, chat())
    assert (text, events[1]) == ("Hello", PrefillProgress(0, 0, 0, image=ImageProgress(1, 2, 0.4, 7.0)))


@pytest.mark.push
@pytest.mark.parametrize("advances", [True, False])
def test_only_a_prompt_that_advances_may_take_long(advances: bool) -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head())
        for done in range(20):
            connection.sendall(f": processing prompt {done if advances else 0}/99\n\n".encode())
            time.sleep(0.05)
        connection.sendall(HELLO)
        raise HangUp

    with serving(script) as server:
        model = RemoteModel(parse_endpoint(f"{server.url}#tiny"), first_s=0.5)
        expected = nullcontext() if advances else pytest.raises(NetworkError, match=r"did not advance for 0\.5 s")
        with RemoteEngine(model) as engine, expected:
            assert len(list(engine.generate(chat()))) > 2


# --- requests


@pytest.mark.parametrize(
    ("prompt", "path", "field", "value"),
    [
        (CHAT, "/v1/chat/completions", "messages", [{"role": "user", "content": "Say hello."}]),
        (TextPrompt("Once upon"), "/v1/completions", "prompt", "Once upon"),
        (TokenPrompt([5, 6]), "/v1/completions", "prompt", [5, 6]),
        (FillPrompt("a", "b"), "/v1/completions", "prompt", "a"),
        (FillPrompt("a", "b"), "/v1/completions", "suffix", "b"),
    ],
)
def test_each_kind_of_prompt_goes_where_it_belongs(prompt: Prompt, path: str, field: str, value: object) -> None:
    with serving(response(HELLO)) as server:
        answer_of(server, Request(prompt))
    assert server.asked[0].path == path
    assert server.asked[0].body[field] == value
    assert server.asked[0].body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in server.asked[0].body


def test_servers_are_not_asked_for_more_than_a_suffix() -> None:
    with serving(response(HELLO)) as server, pytest.raises(UsageError, match="servers fill only the gap"):
        answer_of(server, Request(FillPrompt("a", "b", line="c")))
    assert server.asked == []


def test_everything_a_request_can_say_is_said() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repeat_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        repeat_last_n=32,
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=3,
        dry_penalty_last_n=128,
        dry_sequence_breakers="none",
        top_n_sigma=1.5,
        typical_p=0.7,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        dynatemp_range=0.25,
        dynatemp_exponent=1.5,
        mirostat=2,
        mirostat_tau=4.0,
        mirostat_eta=0.2,
        adaptive_target=0.6,
        adaptive_decay=0.8,
        samplers="top-k;xtc",
        logit_bias={5: float("-inf"), 6: 2.0},
        seed=11,
    )
    prompt = ChatPrompt(CHAT.messages, [{"type": "function"}], template_kwargs={"enable_thinking": False})
    with serving(response(HELLO)) as server:
        answer_of(server, Request(prompt, 9, ("x",), sampling, 2), ignore_eos=True)
    assert server.asked[0].body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say hello."}],
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.2,
        "repetition_penalty": 1.2,
        "repeat_last_n": 32,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 128,
        "dry_sequence_breakers": [],
        "top_n_sigma": 1.5,
        "typical_p": 0.7,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dynatemp_range": 0.25,
        "dynatemp_exponent": 1.5,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "adaptive_target": 0.6,
        "adaptive_decay": 0.8,
        "samplers": ["top_k", "xtc"],
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {"5": -100.0, "6": 2.0},
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 2,
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        (ResponseFormat(FormatKind.JSON_OBJECT), {"type": "json_object"}),
        (
            ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "array"}'),
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "array"}, "strict": True}},
        ),
        (  # with `strict`, servers would refuse the schema, or not allow what the schema allows
            ResponseFormat(FormatKind.JSON_SCHEMA, '{"properties": {}}'),
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"properties": {}}, "strict": False}},
        ),
    ],
)
def test_servers_get_the_format_of_the_answer(wanted: ResponseFormat, sent: object) -> None:
    with serving(response(HELLO)) as server:
        answer_of(server, chat(response_format=wanted))
    assert server.asked[0].body["response_format"] == sent


@pytest.mark.parametrize("kind", [FormatKind.REGEX, FormatKind.GRAMMAR, FormatKind.CHOICE])
def test_formats_that_servers_do_not_have_are_refused(kind: FormatKind) -> None:
    wanted = ResponseFormat(kind, "a", ("a",), origin="--flag")
    with serving(response(HELLO)) as server, pytest.raises(UsageError, match="--flag: not supported for models on a"):
        answer_of(server, chat(response_format=wanted))
    assert server.asked == []


@pytest.mark.parametrize(
    ("choice", "sent"),
    [("none", "none"), ("required", "required"), ("weather", {"type": "function", "function": {"name": "weather"}})],
)
def test_servers_get_the_choice_of_tools(choice: str, sent: object) -> None:
    prompt = ChatPrompt(CHAT.messages, [{"type": "function"}], tool_choice=choice, parallel_tool_calls=False)
    with serving(response(HELLO)) as server:
        answer_of(server, Request(prompt))
    assert (server.asked[0].body["tool_choice"], server.asked[0].body["parallel_tool_calls"]) == (sent, False)


def test_tool_calls_arrive_in_pieces() -> None:
    pieces = [
        {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Oslo"}'}},
        {"index": 1, "id": "call_2", "function": {"name": "time", "arguments": "{}"}},
    ]
    stream = said("Let me see.") + b"".join(said(tool_calls=[piece]) for piece in pieces) + said(finish="tool_calls")
    with serving(response(stream + counted(7, 9) + DONE)) as server:
        text, events = answer_of(server, chat())
    deltas = [delta for event in events if isinstance(event, TextDelta) for delta in event.tool_calls]
    assert deltas == [
        ToolCallDelta(0, "call_1", "weather"),
        ToolCallDelta(0, arguments='{"city": '),
        ToolCallDelta(0, arguments='"Oslo"}'),
        ToolCallDelta(1, "call_2", "time", "{}"),
    ]
    assert (text, finished(events).reason) == ("Let me see.", FinishReason.TOOL_CALLS)


def test_calls_without_an_index_get_their_place() -> None:
    pieces = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "abc"]
    stream = said(tool_calls=pieces[:2]) + said(tool_calls=pieces[2:]) + said(finish="tool_calls")
    with serving(response(stream + counted(7, 9) + DONE)) as server:
        _, events = answer_of(server, chat())
    calls = CollectedCalls()
    for event in events:
        if isinstance(event, TextDelta):
            calls.take(event.tool_calls)
    assert calls.calls == [ToolCall(name, name, "{}") for name in "abc"]


@pytest.mark.parametrize(
    "calls",
    [{}, [5], [{"index": -1}], [{"index": 10**6}], [{"index": 0, "function": []}], [{"index": 0, "id": 7}]],
)
def test_malformed_tool_calls_are_an_error(calls: object) -> None:
    with (
        serving(response(said(tool_calls=calls) + DONE)) as server,
        pytest.raises(NetworkError, match="does not match"),
    ):
        answer_of(server, chat())


def test_only_chosen_sampling_is_sent() -> None:
    sampling = SamplingParams(temperature=0.8, top_k=7, seed=11)
    with serving(response(HELLO)) as server:
        answer_of(server, Request(CHAT, sampling=sampling, sent_sampling=frozenset({"top_k", "repeat_penalty"})))
        answer_of(server, Request(CHAT, sampling=sampling, sent_sampling=frozenset()))
    plain = {"model", "messages", "stream", "stream_options"}
    assert server.asked[0].body.keys() - plain == {"top_k", "repeat_penalty", "repetition_penalty"}
    assert server.asked[1].body.keys() == plain


@pytest.mark.parametrize(
    "request_", [chat(max_tokens=-1), chat(stop=("",)), Request(ChatPrompt(CHAT.messages, add_generation_prompt=False))]
)
def test_what_cannot_be_asked_is_refused_and_nothing_is_sent(request_: Request) -> None:
    with serving(response(HELLO)) as server, RemoteEngine.open(server.url) as engine:
        with pytest.raises(UsageError):
            engine.submit(request_)
        assert engine.idle
        assert server.asked == []


def test_what_the_server_would_not_take_is_told_once() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        refusal = response(b'{"detail": "extra"}', status="400 Bad Request")
        connection.sendall(refusal if "top_k" in asked.body else response(HELLO))

    told: list[str] = []
    with serving(script) as server, RemoteEngine.open(server.url, ignore_eos=True, explain=told.append) as engine:
        for _ in range(2):
            list(engine.generate(chat()))
    fields = ("top_k", "min_p", "repeat_penalty", "repetition_penalty", "repeat_last_n", "ignore_eos")
    assert engine.left_out == fields
    assert told == [f"127.0.0.1:{server.port} does not support {', '.join(fields)}: continuing without"]


# --- concurrent requests


def run_all(engine: RemoteEngine, count: int) -> tuple[dict[int, str], dict[int, Event]]:
    ids = [engine.submit(Request(TextPrompt(f"number {number}"))) for number in range(count)]
    texts = dict.fromkeys(ids, "")
    ends: dict[int, Event] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, TextDelta):
                texts[event.request_id] += event.text
            elif not isinstance(event, PrefillProgress):
                assert event.request_id not in ends
                ends[event.request_id] = event
    return texts, ends


@pytest.mark.parametrize("at_once", [64, 5])
def test_of_64_requests_none_is_lost_and_no_more_run_at_once_than_may(at_once: int) -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def script(asked: Asked, connection: socket.socket) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        connection.sendall(stream_head().replace(b"close", b"keep-alive").replace(b"\r\n\r\n", b"\r\n"))
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        pieces = [said(piece) for piece in [*asked.body["prompt"], "!"]] + [said(finish="stop"), DONE]
        for piece in pieces:
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            time.sleep(0.001)
        with lock:
            running -= 1
        connection.sendall(b"0\r\n\r\n")

    with serving(script) as server, RemoteEngine.open(server.url, max_sequences=at_once) as engine:
        texts, ends = run_all(engine, 64)
    assert list(texts.values()) == [f"number {number}!" for number in range(64)]
    assert len(ends) == 64
    assert all(isinstance(end, Finished) for end in ends.values())
    assert 1 < most <= at_once
    assert len({asked.connection for asked in server.asked}) <= at_once


def test_a_request_that_fails_harms_no_other() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        fails = asked.body["prompt"] == "number 1"
        connection.sendall(response(b"{", status="500 Oh") if fails else response(HELLO))

    with serving(script) as server, RemoteEngine.open(server.url, max_sequences=2) as engine:
        texts, ends = run_all(engine, 4)
    assert list(texts.values()) == ["Hello", "", "Hello", "Hello"]
    failed = ends[1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, NetworkError)


def test_generate_runs_one_request_alone() -> None:
    with serving(response(HELLO)) as server, RemoteEngine.open(server.url) as engine:
        engine.submit(chat())
        with pytest.raises(UsageError, match="unfinished"):
            next(engine.generate(chat()))


# --- stopping


def holding(server_of: list[HostileServer], first: bytes) -> Any:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(first)
        wait_for_hang_up(server_of[0], connection)

    return script


@pytest.mark.parametrize("first", [b"", stream_head() + said("Hel")])
def test_cancelling_everything_hangs_up_and_keeps_the_text(first: bytes) -> None:
    held: list[HostileServer] = []
    with serving(holding(held, first)) as server, RemoteEngine.open(server.url) as engine:
        held.append(server)
        running, waiting = engine.submit(chat()), engine.submit(chat())
        events: list[Event] = []
        if first:
            while not any(isinstance(event, TextDelta) for event in events):
                events += engine.step()
        else:
            time.sleep(0.1)
        started = time.monotonic()
        threading.Timer(0.1, engine.cancel_current).start()
        while not engine.idle:
            events += engine.step()
        assert time.monotonic() - started < 30  # the server would hold the connection forever
        assert server.hung_up.wait(60)
    ends = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert set(ends) == {running, waiting}
    assert {end.reason for end in ends.values()} == {FinishReason.CANCELLED}
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == ("Hel" if first else "")
    assert ends[running].timings.generated_tokens == (1 if first else 0)


def test_one_request_can_be_cancelled_and_the_next_in_line_takes_its_place() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        if asked.body["prompt"] == "stuck":
            wait_for_hang_up(server, connection)
        connection.sendall(response(HELLO))

    with serving(script) as server, RemoteEngine.open(server.url) as engine:
        stuck, line = engine.submit(Request(TextPrompt("stuck"))), engine.submit(Request(TextPrompt("line")))
        engine.cancel(stuck)
        engine.cancel(12345)
        ends: dict[int, FinishReason] = {}
        while not engine.idle:
            ends |= {event.request_id: event.reason for event in engine.step() if isinstance(event, Finished)}
    assert ends == {stuck: FinishReason.CANCELLED, line: FinishReason.STOP}


def test_closing_the_iterator_and_closing_the_engine_hang_up() -> None:
    held: list[HostileServer] = []
    with serving(holding(held, stream_head() + said("Hel"))) as server:
        held.append(server)
        engine = RemoteEngine.open(server.url)
        events = engine.generate(chat())
        while not isinstance(next(events), TextDelta):
            pass
        events.close()  # type: ignore[attr-defined]
        assert server.hung_up.wait(60)
        assert engine.idle
        server.hung_up.clear()
        engine.submit(chat())
        time.sleep(0.1)
        engine.close()
        engine.close()
        assert server.hung_up.wait(60)


# --- a real server


@pytest.fixture(scope="module")
def real_port() -> Iterator[int]:
    with llama_server(smollm2()) as port:
        yield port


@pytest.mark.night
def test_a_real_server_says_what_the_model_says_here(real_port: int) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "Say hello in French."}])
    request = Request(prompt, max_tokens=4, sampling=GREEDY)  # beyond four tokens, two candidates are nearly tied
    with RemoteEngine.open(f"http://127.0.0.1:{real_port}") as engine:
        there = "".join(event.text for event in engine.generate(request) if isinstance(event, TextDelta))
    with Engine.open(smollm2(), OpenOptions(backend="llama", threads=1)) as local:
        here = "".join(event.text for event in local.generate(request) if isinstance(event, TextDelta))
    assert there == here != ""


@pytest.mark.night
def test_a_real_server_completes_texts_tells_logprobs_and_answers_several(real_port: int) -> None:
    with RemoteEngine.open(f"http://127.0.0.1:{real_port}", max_sequences=3) as engine:
        request = Request(TextPrompt("Once upon a"), max_tokens=6, sampling=GREEDY, logprobs=2)
        ids = [engine.submit(request) for _ in range(3)]
        texts = dict.fromkeys(ids, "")
        deltas: list[TextDelta] = []
        while not engine.idle:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, TextDelta):
                    texts[event.request_id] += event.text
                    deltas.append(event)
    assert len(set(texts.values())) == 1
    assert texts[ids[0]].startswith(" time")
    assert all(len(event.logprobs) == 1 and event.logprobs[0].chosen.logprob <= 0 for event in deltas)


@pytest.mark.night
def test_ttft_is_what_an_observer_on_the_wire_sees(real_port: int) -> None:
    """A relay timestamps packets, from the last byte of the request to the first byte of text."""
    measured = []
    with relay_to(real_port) as relay, RemoteEngine.open(f"http://127.0.0.1:{relay.port}/v1#smollm2") as engine:
        for number in range(9):
            prompt = ChatPrompt([{"role": "user", "content": f"{number} is a number. Tell me about it."}])
            events = list(engine.generate(Request(prompt, max_tokens=4, sampling=GREEDY)))
            measured.append(finished(events).timings.ttft_s)
    assert len(relay.ttft_s) == len(measured)
    differences = [ours - seen for ours, seen in zip(measured, relay.ttft_s, strict=True)]
    print("TTFT less what the relay saw, ms:", [round(1000 * difference, 2) for difference in differences])  # noqa: T201
    assert abs(statistics.median(differences)) < 0.010
    assert statistics.median(measured) > 0.015  # long enough to measure


def test_only_the_server_can_count_the_tokens_of_a_prompt() -> None:
    with serving(response(HELLO)) as server, RemoteEngine.open(server.url) as engine:
        assert engine.prompt_tokens(Request(CHAT)) is None
