"""Tests with real servers in all APIs: one is killed in the middle of a stream, and the other one continues it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import pytest

from llmrun.engine.remote.request import parse_endpoint
from llmrun.serving.app import _routes
from llmrun.serving.upstreams.upstream import _AT_ROOT, Upstream
from tests.support.serving.fake_model import TIMEOUT_S
from tests.support.serving.fronts import fronting
from tests.support.serving.restartable import Restartable
from tests.support.serving.served import scripted_arguments
from tests.support.serving.servers import RunningServer

pytestmark = pytest.mark.push

NOISE: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "model": "scripted", "stream": True}
MESSAGES = [{"role": "user", "content": "Tell me a story about the sea, a ferry and the rain"}]
CALLS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 60},
    "/v1/completions": {"prompt": MESSAGES[0]["content"], "max_tokens": 60},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 60},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 60},
}
SEEN = 10  # events until the server is killed
IN_FLIGHT = re.compile(r"^llmrun_upstream_requests_in_flight\{.*\} (\d+)$", re.MULTILINE)
# times, and how much of the prompt is in the cache
VARYING = re.compile(rb'"timings":\{[^}]*\}|"(?:(?:cache_read_)?input|cached|cache_write)_tokens":\d+')


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Restartable]]:
    folder = tmp_path_factory.mktemp("servers")
    arguments = scripted_arguments(folder, step_seconds=0.02)
    with ExitStack() as stack:
        made = [Restartable(arguments, folder / f"{number}.log") for number in range(2)]
        for server in made:
            stack.callback(server.close)
        yield made


@pytest.fixture(scope="module")
def front(servers: Sequence[Restartable]) -> Iterator[RunningServer]:
    with fronting(*(server.url for server in servers)) as running:
        yield running


def begin(port: int, path: str, last: bytes = b"") -> http.client.HTTPResponse:
    headers = {"content-type": "application/json", "last-event-id": last.decode()}
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    line.request("POST", path, json.dumps({**NOISE, **CALLS[path]}), headers)
    response = line.getresponse()
    assert response.status == 200
    return response


def next_event(response: http.client.HTTPResponse) -> bytes:
    lines = [response.readline()]
    while lines[-1] != b"\n":
        assert lines[-1]
        lines.append(response.readline())
    return b"".join(lines)


@pytest.mark.night
@pytest.mark.parametrize("path", CALLS)
def test_streams_survive_the_death_of_their_server(
    path: str, servers: Sequence[Restartable], front: RunningServer
) -> None:
    """The client gets the bytes that the other server sends for the whole answer."""
    response = begin(front.port, path)
    seen = [next_event(response) for _ in range(SEEN)]
    busy = IN_FLIGHT.findall(front.send("GET", "/metrics").body.decode()).index("1")
    servers[busy].kill()
    received = b"".join(seen[1:]) + response.read()
    found = re.search(rb"^id: (.+)$", seen[0], re.MULTILINE)
    assert found is not None
    expected = begin(servers[1 - busy].port, path, found[1]).read()
    assert VARYING.sub(b"", received) == VARYING.sub(b"", expected)
    servers[busy].restart()


@pytest.mark.night
def test_ollamas_lines_are_passed_on(servers: Sequence[Restartable], front: RunningServer) -> None:
    """Its streams have no IDs, and are the default."""
    body = {
        "model": "scripted:latest",
        "messages": MESSAGES,
        "options": {"seed": 7, "temperature": 2, "num_predict": 9},
    }
    streamed = front.send("POST", "/api/chat", body)
    lines = [json.loads(line) for line in streamed.body.splitlines()]
    whole = front.send("POST", "/api/chat", {**body, "stream": False}).json
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    assert len(lines) > 5
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert front.send("POST", "/api/show", {"model": "scripted"}).status == 200
    unloaded = front.send("POST", "/api/chat", {"model": "scripted", "messages": [], "keep_alive": 0})
    assert unloaded.json["done_reason"] == "unload"
    assert front.send("POST", "/api/chat", {**body, "stream": False}).status == 200


def test_errors_have_the_form_of_the_api(front: RunningServer) -> None:
    """Both those of the upstream, and those of this server itself."""
    for model in ("scripted", "nothing"):
        wrong = {"model": model, "messages": 5, "max_tokens": 1}
        assert front.send("POST", "/api/chat", wrong).json.keys() == {"error"}
        assert isinstance(front.send("POST", "/api/chat", wrong).json["error"], str)
        assert front.send("POST", "/v1/messages", wrong).json["type"] == "error"
        assert "param" in front.chat(**wrong).error


def test_every_route_that_is_forwarded_has_a_path_on_upstreams() -> None:
    """Upstreams have the paths below /v1, and those at the root that are listed in _AT_ROOT."""
    routes = [route for route in _routes(Mock()) if "POST" in (route.methods or ()) and not route.param_convertors]
    paths = {route.path for route in routes}
    assert len(paths) > 15
    found = [path for path in paths if path.startswith(("/v1/", *_AT_ROOT)) or f"/v1{path}" in paths]
    assert paths - {*found} == set()


def test_llama_servers_routes_are_outside_v1() -> None:
    upstream = Upstream(0, parse_endpoint("http://10.0.0.5:8080/v1"), None)
    paths = "/completion", "/completions", "/apply-template"
    assert [upstream.url(path) for path in paths] == [
        "http://10.0.0.5:8080/completion",
        "http://10.0.0.5:8080/v1/completions",
        "http://10.0.0.5:8080/apply-template",
    ]
