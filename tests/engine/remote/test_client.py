"""Tests of the client for a remote model: requests, responses, and servers that misbehave."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import (
    Cancelled,
    ContextExceeded,
    LlmrunError,
    ModelNotFound,
    NetworkError,
    UsageError,
)
from llmrun.engine.remote.client import Call, RemoteModel
from llmrun.engine.remote.request import Endpoint, is_endpoint, parse_endpoint
from llmrun.engine.remote.stream import LONGEST_LINE, Chunk, Teller, Usage, read_chunks
from tests.support.servers.hostile_server import (
    DONE,
    HELLO,
    Asked,
    HangUp,
    HostileServer,
    Script,
    counted,
    event,
    response,
    said,
    serving,
    stream_head,
    wait_for_hang_up,
)
from tests.support.tiers import examples

KEY = "sk-very-secret-0123456789"
BODY = {"model": "tiny", "messages": []}


def opened(server: HostileServer, **options: Any) -> RemoteModel:
    return RemoteModel(parse_endpoint(server.url), **options)


def ask(model: RemoteModel, call: Call | None = None, *, most_events: int = 1000, **extras: Any) -> list[Chunk]:
    return list(model.stream("/chat/completions", BODY, extras, call or Call(), most_events=most_events))


def answered(script: Script | bytes, **options: Any) -> list[Chunk]:
    with serving(script) as server:
        model = opened(server, **options)
        try:
            return ask(model)
        finally:
            model.close()


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


# --- addresses


@pytest.mark.parametrize(
    ("name", "base", "model", "is_loopback"),
    [
        ("http://127.0.0.1:8080/v1#tiny", "http://127.0.0.1:8080/v1", "tiny", True),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1", "", True),
        ("http://localhost:8080/v1/", "http://localhost:8080/v1", "", True),
        ("HTTPS://Example.org#org/model:q4#2", "https://example.org/v1", "org/model:q4#2", False),
        ("https://openrouter.ai/api/v1#a", "https://openrouter.ai/api/v1", "a", False),
        ("https://a.example/v1beta/openai#a", "https://a.example/v1beta/openai", "a", False),
        ("http://[::1]:80/x#a", "http://[::1]:80/x/v1", "a", True),
        ("http://10.0.0.1#a", "http://10.0.0.1/v1", "a", False),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/v1", "", True),
        ("127.0.0.1", "http://127.0.0.1/v1", "", True),
        ("localhost:8080/v1/#tiny", "http://localhost:8080/v1", "tiny", True),
        ("LOCALHOST:80", "http://localhost:80/v1", "", True),
        ("[::1]:8080#a/b.gguf", "http://[::1]:8080/v1", "a/b.gguf", True),
        ("spark:1234", "http://spark:1234/v1", "", False),
        ("spark:25070", "http://spark:25070/v1", "", False),
        ("spark:8000/v1", "http://spark:8000/v1", "", False),
        ("gpu-1.lan:11434#qwen3:4b", "http://gpu-1.lan:11434/v1", "qwen3:4b", False),
        ("0.0.0.0:8080", "http://127.0.0.1:8080/v1", "", True),
        ("http://[::]:8080/", "http://[::1]:8080/v1", "", True),
        ("http://127.0.0.1:8080//v1//", "http://127.0.0.1:8080/v1", "", True),
        ("http://127.0.0.1:8080/v1/chat/completions", "http://127.0.0.1:8080/v1", "", True),
        ("127.0.0.1:8080/v1/completions#a", "http://127.0.0.1:8080/v1", "a", True),
        ("http://127.0.0.1:8080/chat/completions/", "http://127.0.0.1:8080/v1", "", True),
        ("http://127.0.0.1:8080/v1/models", "http://127.0.0.1:8080/v1", "", True),
        ("http://127.0.0.1:11434/api/chat", "http://127.0.0.1:11434/v1", "", True),
        ("https://a.example/v1beta/openai/chat/completions", "https://a.example/v1beta/openai", "", False),
    ],
)
def test_an_endpoint_is_taken_apart(name: str, base: str, model: str, is_loopback: bool) -> None:
    assert is_endpoint(name)
    endpoint = parse_endpoint(name)
    assert (endpoint.base, endpoint.model, endpoint.is_loopback) == (base, model, is_loopback)
    assert parse_endpoint(endpoint.address) == endpoint


@pytest.mark.parametrize(
    "name",
    [
        "https://example.org/file.gguf",
        "HTTP://example.org:8080/v1/File.GGUF?download=true#x",
        "https://huggingface.co/owner/name",
        "https://hf.co/owner/name/resolve/main/file.gguf",
        "huggingface.co/owner/name",
        "hf:owner/name:Q8_0",
        "qwen3:4b",
        "qwen2.5:7",
        "llama3.2:135m",
        "127.0.0.1.gguf",
        "localhost.gguf",
        "1.2.3",
        "./127.0.0.1:8080",
        "name:8080b",
        "deepseek-r1:0528",
        "mistral-small:2506",
        "deepseek-v2.5:1210",
        "C:\\8080",
        "",
    ],
)
def test_models_to_download_are_not_endpoints(name: str) -> None:
    assert not is_endpoint(name)


@pytest.mark.parametrize(
    "name",
    [
        "http://",
        "http://:80#m",
        "http://host:99999/v1",
        "http://host:x/v1",
        "http://[::1/v1",
        "http://ho st/v1",
        "http://host/v1?key=secret",
        "http://host/\x1b[31m",
        "http://host#a\nb",
        "http://user:secret@host/v1#m",
        "http://secret@host/v1",
    ],
)
def test_a_url_that_cannot_be_meant_is_a_usage_error_that_shows_no_secret(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_endpoint(name)
    assert "secret" not in str(refused.value) + refused.value.hint
    assert str(refused.value).isprintable()


def test_offline_another_machine_is_not_asked() -> None:
    with pytest.raises(NetworkError, match="offline"):
        RemoteModel.open(parse_endpoint("http://example.org#m"), offline=True)


# --- the server's only model


def models(*names: object) -> bytes:
    return response(json.dumps({"data": [{"id": name} for name in names]}).encode(), kind="application/json")


def test_the_only_model_is_taken_when_none_is_named() -> None:
    with serving(models("one")) as server:
        model = RemoteModel.open(parse_endpoint(server.url.partition("#")[0]))
        model.close()
    assert model.endpoint.model == "one"
    assert server.asked[0].path == "/v1/models"


@pytest.mark.parametrize(
    ("list_of_models", "kind", "words"),
    [
        (models("a", "b", "c"), UsageError, "the server has 3 models: a, b, c"),
        (models(*"abcdefg"), UsageError, "a, b, c, d, e and 2 more"),
        (models(), ModelNotFound, "the server has no models"),
        (models(5), NetworkError, "not a list of models"),
        (models("a\x1b[2J"), NetworkError, "not a list of models"),
        (response(b"[" * 100_000), NetworkError, "not a list of models"),
        (response(b"{}", status="404 Not Found"), NetworkError, "address not found"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (5 << 20), NetworkError, "not a list of models"),
    ],
)
def test_no_only_model_is_one_line(list_of_models: bytes, kind: type[LlmrunError], words: str) -> None:
    with serving(list_of_models) as server, pytest.raises(kind, match=words) as refused:
        RemoteModel.open(parse_endpoint(server.url.partition("#")[0]))
    assert str(refused.value).isprintable()


# --- requests and responses


def test_an_answer_comes_as_chunks_with_the_moments_they_arrived() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head() + said("", role="assistant"))
        for text in ("Hel", "lo"):
            time.sleep(0.05)
            connection.sendall(said(text))
        connection.sendall(said(finish="stop") + counted(7, 3, 2) + DONE)
        raise HangUp

    before = time.perf_counter()
    chunks = answered(script)
    assert [chunk.text for chunk in chunks] == ["", "Hel", "lo", "", ""]
    assert [chunk.finish for chunk in chunks] == [None, None, None, "stop", None]
    assert chunks[-1].usage == Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=3)
    moments = [before, *(chunk.arrived for chunk in chunks)]
    assert moments == sorted(moments)
    assert moments[3] - moments[2] >= 0.03 <= moments[2] - moments[1]


def test_the_request_is_json_over_one_kept_connection_and_asks_for_no_compression() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(response(HELLO))

    with serving(script) as server:
        model = opened(server, key=KEY)
        for _ in range(3):
            assert text_of(ask(model, top_k=5)) == "Hello"
        model.close()
    assert {asked.connection for asked in server.asked} == {0}
    for asked in server.asked:
        assert (asked.method, asked.path) == ("POST", "/v1/chat/completions")
        assert asked.body == BODY | {"top_k": 5}
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        assert asked.headers["accept-encoding"] == "identity"


def test_a_kept_connection_that_the_server_gave_up_is_made_again() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        if len(server.asked) == 2:
            raise HangUp  # the second request on the first connection
        connection.sendall(response(HELLO))

    with serving(script) as server:
        model = opened(server)
        assert [text_of(ask(model)) for _ in range(2)] == ["Hello", "Hello"]
        model.close()
    assert [asked.connection for asked in server.asked] == [0, 0, 1]


def test_without_a_key_none_is_sent() -> None:
    with serving(response(HELLO)) as server:
        model = opened(server)
        ask(model)
        model.close()
    assert "authorization" not in server.asked[0].headers


def test_a_server_that_refuses_fields_beyond_openais_is_asked_without_them_from_then_on() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        picky = {"top_k", "ignore_eos"} & set(asked.body)
        refusal = response(b'{"detail": "extra fields"}', status="422 Unprocessable", kind="application/json")
        connection.sendall(refusal if picky else response(HELLO))

    with serving(script) as server:
        model = opened(server)
        for _ in range(2):
            assert text_of(ask(model, top_k=5, ignore_eos=True)) == "Hello"
        model.close()
    assert ["top_k" in asked.body for asked in server.asked] == [True, False, False]
    assert set(model.left_out) == {"top_k", "ignore_eos"}


def test_a_request_refused_without_extra_fields_too_does_not_cost_them() -> None:
    with serving(response(b'{"error": {"message": "no!"}}', status="400 Bad Request")) as server:
        model = opened(server)
        with pytest.raises(NetworkError, match=r"rejected: .*no! \(HTTP 400\)"):
            ask(model, top_k=5)
        model.close()
    assert len(server.asked) == 2
    assert model.left_out == ()


def test_loopback_is_asked_without_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert text_of(answered(response(HELLO))) == "Hello"


def test_another_machine_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(response(HELLO)) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        model = RemoteModel(parse_endpoint("http://llm.invalid#tiny"))
        assert text_of(ask(model)) == "Hello"
        model.close()
    assert server.asked[0].path == "http://llm.invalid/v1/chat/completions"


# --- misbehaving servers


def ended_stream(*events: bytes) -> bytes:
    return stream_head() + b"".join(events)


JSON_KIND = "application/json"
WRONG: dict[str, tuple[bytes, type[LlmrunError], str]] = {
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", NetworkError, "connection lost"),
    "nothing at all": (b"", NetworkError, "connection lost"),
    "random bytes": (bytes(range(256)) * 10, NetworkError, "connection lost"),
    "endless header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20), NetworkError, "connection lost"),
    "cut in the headers": (b"HTTP/1.1 200 OK\r\nContent-Ty", NetworkError, "connection lost"),
    "endless line": (
        ended_stream(b"data: " + b"x" * (LONGEST_LINE + 99)),
        NetworkError,
        "a line of more than 1,048,576",
    ),
    "endless event": (ended_stream(b"data: 1234567\n" * 99_999), NetworkError, "an event of more than"),
    "no event stream": (response(b"hello\n" * 9), NetworkError, "answer was cut off"),
    "not JSON": (response(event(b"{oops")), NetworkError, "not valid JSON: .*{oops"),
    "control characters": (response(event(b"\x1b]0;owned\x07")), NetworkError, r"\\x1b\]0;owned\\x07"),
    "deeply nested": (response(event(b"[" * 200_000)), NetworkError, "not valid JSON"),
    "a long number": (response(event(b"1" * 10_000)), NetworkError, "not valid JSON"),
    "a list": (response(event([])), NetworkError, "does not match the API"),
    "choices is text": (response(event({"choices": "x"})), NetworkError, "choices: expected list, got str"),
    "a choice is a number": (response(event({"choices": [4]})), NetworkError, "expected an object with .*, got int"),
    "delta is a list": (response(event({"choices": [{"delta": []}]})), NetworkError, "delta: expected dict, got list"),
    "content is a number": (response(said(content=5)), NetworkError, "content: expected str, got int"),
    "usage counts text": (
        response(event({"usage": {"prompt_tokens": "9"}})),
        NetworkError,
        "prompt_tokens: expected int, got str",
    ),
    "usage counts backwards": (response(counted(-5, 1)), NetworkError, "prompt_tokens: expected a token count"),
    "usage counts true": (
        response(event({"usage": {"prompt_tokens": True}})),
        NetworkError,
        "prompt_tokens: expected int, got bool",
    ),
    "logprob is text": (
        response(event({"choices": [{"logprobs": {"content": [{"token": "a", "logprob": "x"}]}}]})),
        NetworkError,
        "logprob: .*, got str",
    ),
    "logprob is NaN": (
        response(event(b'{"choices": [{"logprobs": {"content": [{"token": "a", "logprob": NaN}]}}]}')),
        NetworkError,
        "logprob: .*, got float",
    ),
    "bytes are none": (
        response(event({"choices": [{"logprobs": {"content": [{"token": "a", "bytes": [999], "logprob": -1}]}}]})),
        NetworkError,
        "bytes: not a list of bytes",
    ),
    "an error page": (response(b"<html><h1>nginx", kind="text/html"), NetworkError, "content type text/html"),
    "an error with 200": (
        response(b'{"error": {"message": "out of\\nmemory"}}', kind=JSON_KIND),
        NetworkError,
        "reported an error: .*out of memory",
    ),
    "an answer that is no stream": (response(b'{"choices": []}', kind=JSON_KIND), NetworkError, "not an event stream"),
    "an error in the stream": (
        response(said("Hel") + event({"error": {"message": "CUDA \x1b[31mdied"}})),
        NetworkError,
        r"reported an error: .*CUDA \\x1b\[31mdied",
    ),
    "llama-server's error": (
        response(b'error: {"error": {"message": "slot"}}\n\n'),
        NetworkError,
        "reported an error: .*slot",
    ),
    "compressed": (response(HELLO, Content_Encoding="gzip"), NetworkError, "compressed"),
    "cut before the end": (ended_stream(said("Hel")), NetworkError, "cut off: .*after 1 events"),
    "cut in an event": (ended_stream(said("Hel")[:-9]), NetworkError, "not valid JSON"),
    "shorter than promised": (response(HELLO)[: -len(HELLO)] + said("x"), NetworkError, "connection lost"),
    "chunks that are none": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        NetworkError,
        "connection lost",
    ),
    "endless": (ended_stream(*[said("x")] * 2000), NetworkError, "too long: .*more than 1,000 events"),
    "401": (response(b"", status="401 Unauthorized"), NetworkError, "not authorised: .*HTTP 401"),
    "403": (response(b"", status="403 Forbidden"), NetworkError, "access denied: .*HTTP 403"),
    "429": (response(b"", status="429 Too Many"), NetworkError, "too many requests"),
    "500": (response(b'{"detail": [{"msg": "bad"}]}', status="500 Oh"), NetworkError, "failed: .*bad .HTTP 500"),
    "503 page": (response(b"<html>" * 99_999, status="503 Oh", kind="text/html"), NetworkError, "no reason given"),
    "redirect": (
        response(b"", status="307 Over", Location="http://evil.example/"),
        NetworkError,
        "http://evil.example",
    ),
    "101": (b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", NetworkError, "connection lost"),
    "no such address": (response(b'{"detail": "Not Found"}', status="404 X"), NetworkError, "address not found"),
    "no such model": (
        response(b'{"error": {"message": "The model `tiny` does not exist."}}', status="404 X"),
        ModelNotFound,
        "model: tiny: not found at 127.0.0.1",
    ),
    "prompt too long": (
        response(b'{"error": {"message": "too long", "code": "context_length_exceeded"}}', status="400 X"),
        ContextExceeded,
        "too long",
    ),
}


@pytest.mark.push
@pytest.mark.parametrize("name", WRONG)
def test_whatever_a_server_does_wrong_is_one_line(name: str) -> None:
    said_by_server, kind, words = WRONG[name]
    with pytest.raises(LlmrunError, match=words) as refused:
        answered(said_by_server)
    assert isinstance(refused.value, kind)
    assert str(refused.value).isprintable()
    assert "127.0.0.1:" in str(refused.value)
    assert len(str(refused.value)) < 400


def test_nobody_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    model = RemoteModel(Endpoint(f"http://127.0.0.1:{port}/v1", "m", f"127.0.0.1:{port}", True))
    with pytest.raises(NetworkError, match=r"unreachable: .*refused"):
        ask(model)
    model.close()


@pytest.mark.parametrize(
    "events",
    [
        said("Hello") + said(finish="stop"),  # no [DONE], and the connection ends
        said("Hello") + DONE,  # no finish reason
        said("Hello") + said(finish="length") + b"data: {\n\n",
        b"\xef\xbb\xbf: a comment\r\n\r\nevent: x\r\n"
        + said("Hello", "stop").replace(b"\n", b"\r\n")
        + b"data: [DONE]",
        b'data: {"choices":\ndata: [{"text": "Hello", "finish_reason": "stop"}]}\n\n',
    ],
)
def test_an_answer_that_is_whole_is_taken_whatever_its_end_looks_like(events: bytes) -> None:
    assert text_of(answered(ended_stream(events))) == "Hello"


def test_half_a_character_of_utf_16_is_no_text() -> None:
    (first, *_) = answered(response(event(b'{"choices": [{"delta": {"content": "a\\ud83d"}}]}') + DONE))
    assert first.text == "a?"


def test_reasoning_and_logprobs_are_told_apart() -> None:
    logprobs = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": [{"token": "y", "logprob": -0.25}]}]}
    columns = {"tokens": ["x"], "token_logprobs": [-0.5], "top_logprobs": [{"x": -0.5, "y": -0.25}]}
    chat, reasoned, completed, _ = answered(
        response(
            event({"choices": [{"delta": {"content": "x"}, "logprobs": logprobs}]})
            + said(reasoning_content="hm")
            + event({"choices": [{"text": "x", "logprobs": columns}]})
            + said(finish="stop")
            + DONE
        )
    )
    assert (reasoned.text, reasoned.reasoning) == ("", "hm")
    for chunk, likeliest in ((chat, [b"y"]), (completed, [b"y", b"x"])):
        [(chosen, top)] = chunk.logprobs
        assert (chosen.text, chosen.logprob, [one.text for one in top]) == (b"x", -0.5, likeliest)


@pytest.mark.push
@pytest.mark.parametrize(
    ("first", "words"),
    [
        (b"", "no answer within 0.3 s"),
        (stream_head(), "no answer within 0.3 s"),
        (stream_head() + said("Hel"), "nothing received for 0.3 s"),
    ],
)
@pytest.mark.parametrize("trickle", [b"", b": ping\n"])
def test_a_server_that_says_nothing_more_is_given_up(first: bytes, words: str, trickle: bytes) -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(first)
        while trickle and first:
            connection.sendall(trickle)
            time.sleep(0.05)
        wait_for_hang_up(server, connection)

    with serving(script) as server:
        model = opened(server, first_s=0.3, between_s=0.3)
        with pytest.raises(NetworkError, match=words):
            ask(model)
        model.close()
        assert server.hung_up.wait(60)


@pytest.mark.parametrize("first", [b"", stream_head(), stream_head() + said("Hel")])
def test_a_call_that_is_stopped_ends_and_hangs_up(first: bytes) -> None:
    sent = threading.Event()

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(first)
        sent.set()
        wait_for_hang_up(server, connection)

    with serving(script) as server:
        model, call = opened(server), Call()
        ended: list[float] = []

        def run() -> None:
            with pytest.raises(Cancelled):
                ask(model, call)
            ended.append(time.monotonic())

        thread = threading.Thread(target=run)
        thread.start()
        assert sent.wait(60)
        time.sleep(0.05)
        stopped = time.monotonic()
        call.stop()
        thread.join(60)
        assert ended[0] - stopped < 30  # the server would hold the connection forever
        assert server.hung_up.wait(60)
        model.close()


def test_a_call_stopped_before_it_begins_is_not_sent_for_long() -> None:
    with serving(lambda asked, connection: wait_for_hang_up(server, connection)) as server:
        model, call = opened(server), Call()
        call.stop()
        with pytest.raises(Cancelled):
            ask(model, call)
        model.close()


def test_a_server_that_never_ends_its_stream_delays_nobody_and_harms_no_answer() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head() + HELLO)
        wait_for_hang_up(server, connection)

    with serving(script) as server:
        model = opened(server)
        started = time.monotonic()
        assert text_of(ask(model)) == "Hello"
        assert time.monotonic() - started < 30  # the response never ends
        model.close()


# --- arbitrary bytes

_FIELDS = ["choices", "delta", "content", "text", "reasoning", "finish_reason", "error", "message", "usage"]
_FIELDS += ["prompt_tokens", "prompt_tokens_details", "cached_tokens", "logprobs", "tokens", "token_logprobs"]
_FIELDS += ["top_logprobs", "token", "logprob", "bytes"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(_FIELDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def pieces(data: bytes, cuts: list[int]) -> Iterator[tuple[float, bytes]]:
    ends = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for number, start in enumerate(ends[:-1]):
        yield float(number), data[start : ends[number + 1]]


def read(data: bytes, cuts: list[int]) -> list[Chunk] | str:
    try:
        return list(read_chunks(pieces(data, cuts), Teller("host", KEY)))
    except LlmrunError as error:
        words = str(error)
    assert words.isprintable()
    return words


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_random_bytes_as_a_stream_raise_nothing_but_our_own(data: bytes, cuts: list[int]) -> None:
    read(data, cuts)


@pytest.mark.push
@given(st.lists(json_values, max_size=4), st.lists(st.integers(0, 2000), max_size=4))
def test_any_json_as_a_stream_raises_nothing_but_our_own(events: list[object], cuts: list[int]) -> None:
    read(b"".join(map(event, events)), cuts)


@given(st.lists(st.integers(0, len(HELLO)), max_size=20))
def test_how_the_network_cuts_a_stream_makes_no_difference(cuts: list[int]) -> None:
    found = read(HELLO, cuts)
    assert not isinstance(found, str)
    whole = read(HELLO, [])
    assert not isinstance(whole, str)
    assert [dataclasses.replace(chunk, arrived=0.0) for chunk in found] == [
        dataclasses.replace(chunk, arrived=0.0) for chunk in whole
    ]


@settings(max_examples=examples(30))
@given(st.binary(max_size=300).filter(lambda data: b"[DONE]" not in data))  # which would be a complete answer
def test_random_bytes_from_a_socket_raise_nothing_but_our_own(data: bytes) -> None:
    for head in (b"", stream_head()):
        with pytest.raises(LlmrunError) as refused:
            answered(head + data)
        assert str(refused.value).isprintable()


# --- the API key


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY} x", f"{KEY}é", "\x00", f"{KEY}\\", f'{KEY}"'])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(UsageError) as refused:
        RemoteModel(parse_endpoint("http://127.0.0.1#m"), key=key)
    assert KEY not in repr(refused.value)


@pytest.mark.parametrize(
    "echo",
    [
        response(json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), status="401 No"),
        response(event(f"{KEY}!".encode())),
        response(event({"error": KEY})),
        response(json.dumps({"error": KEY}).encode(), kind="application/json"),
        response(b"", kind=KEY),
        response(HELLO, Content_Encoding=KEY),
        response(b"", status="302 There", Location=f"http://evil.example/{KEY}"),
        f"HTTP/1.1 {KEY}\r\n\r\n".encode(),
        f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n".encode(),
    ],
)
def test_a_server_that_repeats_the_key_does_not_get_it_shown(echo: bytes) -> None:
    with serving(echo) as server:
        model = opened(server, key=KEY)
        with pytest.raises(LlmrunError) as refused:
            ask(model)
        model.close()
    error: BaseException | None = refused.value
    while error is not None:
        assert KEY not in f"{error!r} {error} {getattr(error, 'hint', '')}"
        error = error.__cause__
    assert KEY not in repr(model) + repr(vars(model)["_client"])


def test_a_redirect_is_not_followed_with_the_key_nor_without() -> None:
    with serving(response(HELLO)) as other:
        redirect = response(b"", status="307 There", Location=f"http://127.0.0.1:{other.port}/v1/chat/completions")
        with pytest.raises(NetworkError, match="redirected"):
            answered(redirect, key=KEY)
        assert other.asked == []
