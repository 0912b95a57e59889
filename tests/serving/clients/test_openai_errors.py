"""Tests with OpenAI's client: errors, retries, timeouts, and clients that leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.serving.openai_clients import client_of
from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.clients

HELLO = [{"role": "user", "content": "Hello?"}]
KEY = "a-long-key-for-tests"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that needs a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    with served("scripted", "--backend", "scripted", "--api-key-file", str(keys), key=KEY) as running:
        yield running


def test_a_key_is_needed(locked: Served) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client_of(locked).models.list()
    assert caught.value.code == "invalid_api_key"
    assert client_of(locked, api_key=KEY).models.list().data[0].id == locked.model


def test_invalid_fields_are_bad_requests(tools: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(tools).chat.completions.create(model="script", messages=HELLO, temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(tools).chat.completions.create(model="script", messages=HELLO, extra_body={"min_tokens": 5})
    assert caught.value.code == "unsupported_parameter"


def test_other_models_are_not_found(tools: Served) -> None:
    asks: tuple[Callable[[], object], ...] = (
        lambda: client_of(tools).chat.completions.create(model="gpt-5", messages=HELLO),
        lambda: client_of(tools).models.retrieve("gpt-5"),
        lambda: client_of(tools).embeddings.create(model="gpt-5", input="x"),
    )
    for ask in asks:
        with pytest.raises(openai.NotFoundError):
            ask()


@pytest.mark.parametrize("stream", [False, True])
def test_long_prompts_are_bad_requests(tools: Served, stream: bool) -> None:
    long = [{"role": "user", "content": "x" * 10_000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(tools).chat.completions.create(model="script", messages=long, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def occupied(server: Served, count: int) -> list[Any]:
    """Begin streams, of which the first runs and the others wait. Their prompts differ, so that none is cached."""
    streams: list[Any] = []
    for number in range(count):
        question = [{"role": "user", "content": f"{number} " + "x" * 300}]
        streams.append(client_of(server).chat.completions.create(model=server.model, messages=question, stream=True))
        if number == 0:
            next(streams[0])  # wait until it runs, so that it does not count as waiting
    return streams


def test_overload_is_a_rate_limit_with_a_time(slow: Served) -> None:
    streams = occupied(slow, 2)
    with pytest.raises(openai.RateLimitError) as caught:
        client_of(slow).chat.completions.create(model=slow.model, messages=HELLO)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 120
    assert caught.value.response.headers["x-should-retry"] == "true"
    assert caught.value.code == "server_overloaded"
    for stream in streams:
        stream.close()


def test_retries_of_the_client_succeed(slow: Served) -> None:
    """Four requests compete for two places. The client waits as long as the server says, and tries again."""

    def ask(number: int) -> str:
        question = [{"role": "user", "content": f"Question {number}"}]
        done = client_of(slow, max_retries=20).chat.completions.create(
            model=slow.model, messages=question, max_tokens=30, temperature=0
        )
        return str(done.choices[0].message.content)

    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(ask, range(4))]
    assert answers == [f"You said: Question {number}" for number in range(4)]
    _, _, metrics = slow.call("GET", "/metrics")
    assert b'status="429"' in metrics


def test_the_end_of_the_server_is_an_error_in_the_stream(slow: Served) -> None:
    (stream,) = occupied(slow, 1)
    assert next(stream).choices
    slow.stop()
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert "shutting down" in caught.value.message


def test_timeouts_end_the_request_on_the_server(slow: Served) -> None:
    question = [{"role": "user", "content": "x" * 1000}]
    with pytest.raises(openai.APITimeoutError):
        client_of(slow, timeout=0.5).chat.completions.create(model=slow.model, messages=question)
    slow.wait_for(slow.is_idle)
    assert slow.metric("llmrun_generated_tokens_total") < 900


def test_a_closed_stream_ends_the_request_on_the_server(slow: Served) -> None:
    running, waiting = occupied(slow, 2)
    assert next(running).choices
    assert not slow.is_idle()
    waiting.close()
    running.close()
    slow.wait_for(slow.is_idle)


def test_a_server_that_is_gone_is_a_connection_error(tmp_path: Path) -> None:
    with served("scripted", "--backend", "scripted") as gone:
        url = gone.url
    began = time.monotonic()
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()
    assert time.monotonic() - began < 60
