"""Tests of /health, /metrics, /openapi.json, /v1/models and paths that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from llmrun.serving.processes.served_model import State
from tests.support.serving.fake_model import LOAD, FakeModel
from tests.support.serving.servers import CHAT, RunningServer, serving

SAMPLE = re.compile(r'[a-z_]+(?:\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*\})? -?[0-9.e+-]+')


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("state", [State.LOADING, State.RESTARTING, State.DRAINING, State.FAILED])
def test_a_server_is_healthy_only_if_its_model_is_ready(state: State) -> None:
    model = FakeModel()
    with serving(model) as server:
        assert server.send("GET", "/health").json == {"status": "ok"}
        model.state = state
        reply = server.send("GET", "/health")
        assert (reply.status, reply.json["status"]) == (503, state.value)
        words = f"the server is not ready: {state.value}"
        assert reply.error == {"code": 503, "message": words, "type": "unavailable_error"}


def test_a_stuck_model_is_not_healthy() -> None:
    model = FakeModel()
    with serving(model) as server:
        model.load = replace(LOAD, beat_age_s=11)
        reply = server.send("GET", "/health")
    assert (reply.status, reply.json["status"]) == (503, "stuck")


def test_metrics_have_the_format_of_prometheus(server: RunningServer) -> None:
    server.chat()
    server.send("GET", "/not/here")
    reply = server.send("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.body.decode().splitlines()
    names = set()
    for line in lines:
        if line.startswith("# TYPE "):
            names.add(line.split()[2])
        elif not line.startswith("# HELP "):
            assert SAMPLE.fullmatch(line), line
            name = line.partition("{")[0].partition(" ")[0]
            assert name in names or re.sub(r"_(bucket|sum|count)$", "", name) in names
    assert f'llmrun_requests_total{{route="{CHAT}",status="200"}} 1' in lines
    assert 'llmrun_requests_total{route="other",status="404"} 1' in lines
    assert 'llmrun_kv_free_tokens{model="fake"} 1000' in lines
    assert 'llmrun_cached_tokens_total{model="fake"} 10' in lines


def test_metrics_compare_predicted_and_actual_waits() -> None:
    """The fake predicts 0.25 s, and its timings say that the request waited for 0.2 s."""
    with serving() as server:
        server.chat()
        lines = server.send("GET", "/metrics").body.decode().splitlines()
    assert "llmrun_predicted_queue_wait_seconds_sum 0.250000" in lines
    assert "llmrun_queue_wait_seconds_sum 0.200000" in lines
    assert "llmrun_queue_wait_error_seconds_sum 0.050000" in lines
    assert "llmrun_time_to_first_token_seconds_count 1" in lines
    assert "llmrun_inter_token_latency_seconds_count 1" in lines


def test_metrics_compare_predicted_and_actual_first_tokens() -> None:
    model = FakeModel()
    with serving(model) as server:
        server.chat()
        model.first_token_s = 40.0
        server.chat()
        lines = server.send("GET", "/metrics").body.decode().splitlines()
    assert "llmrun_predicted_first_token_seconds_sum 40.000000" in lines
    assert "llmrun_predicted_first_token_seconds_count 1" in lines  # the first request had no prediction
    assert 'llmrun_first_token_error_seconds_bucket{le="60.0"} 1' in lines
    assert 'llmrun_first_token_error_seconds_bucket{le="30.0"} 0' in lines


def test_paths_that_clients_invent_make_no_metrics(server: RunningServer) -> None:
    for number in range(5):
        server.send("GET", f"/invented/{number}")
    assert b"invented" not in server.send("GET", "/metrics").body


def test_openapi_describes_the_routes(server: RunningServer) -> None:
    document = server.send("GET", "/openapi.json").json
    for path, operations in document["paths"].items():
        for method in operations.keys() & {"get", "post"}:
            filled = path.replace("{id}", "fake")
            body = b"{}" if method == "post" else None
            assert server.send(method.upper(), filled, body).status != 404, path


def test_models_are_listed_and_found_by_name(server: RunningServer) -> None:
    listed = server.send("GET", "/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["fake"]
    assert server.send("GET", "/v1/models/fake").json == listed["data"][0]
    missing = server.send("GET", "/v1/models/owner/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_other_paths_and_methods_are_errors_in_the_form_of_the_api(server: RunningServer) -> None:
    missing, wrong = server.send("GET", "/v1/nothing"), server.send("GET", CHAT)
    assert (missing.status, missing.error["type"]) == (404, "invalid_request_error")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert server.send("GET", "/v1/models/").status in (200, 404)


def test_hostile_paths_are_escaped_in_the_log(server: RunningServer) -> None:
    server.send("GET", "/a%0d%0a%1b%5b31mfake%20line" + "x" * 500)
    line = server.log[-1]
    assert line.isprintable()
    assert len(line) < 160


def test_health_checks_are_not_logged(server: RunningServer) -> None:
    paths = "/health", "/v1/health", "/metrics", "/props", "/slots"
    for path in paths:
        server.send("GET", path)
    assert not [line for line in server.log if any(f"{path}  200" in line for path in paths)]
