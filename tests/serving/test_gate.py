"""Tests of the gate: host names, origins, CORS and API keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmrun.serving.options import ServingOptions
from tests.support.serving.servers import CHAT, HELLO, Reply, RunningServer, serving

KEY, OTHER_KEY = "a-long-enough-test-key", "another-long-enough-key"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(options=ServingOptions(allowed_hosts=frozenset({"Models.example"}))) as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with serving(options=ServingOptions(keys=(KEY, OTHER_KEY))) as running:
        yield running


@pytest.fixture(scope="module")
def open_to_app() -> Iterator[RunningServer]:
    with serving(options=ServingOptions(keys=(KEY,), origins=frozenset({"https://app.example"}))) as running:
        yield running


def chat(server: RunningServer, **headers: str) -> Reply:
    return server.send("POST", CHAT, HELLO, {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8080", "app.localhost", "localhost.", "models.example", "models.example:443"),
        *("127.0.0.1:1", "[::1]:8080", "[::1]", "10.0.0.7"),
    ],
)
def test_own_names_and_addresses_are_allowed(server: RunningServer, host: str) -> None:
    assert chat(server, Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a:b:c"),
        *(
            "[]",
            "[]:80",
            "[::1]evil.example",
            "[::1",
            "127.0.0.1]",
            "localhost:80:evil.example",
            "localhost:evil.example",
        ),
    ],
)
def test_rebound_host_names_are_refused(server: RunningServer, host: str) -> None:
    asked = len(server.model.asked)
    reply = chat(server, Host=host)
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert "--allowed-host" in reply.error["message"]
    assert len(server.model.asked) == asked


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "Cross-Site"},
        {"Sec-Fetch-Site": ""},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "none"},
    ],
)
def test_foreign_pages_are_refused_before_anything_runs(server: RunningServer, headers: dict[str, str]) -> None:
    asked = len(server.model.asked)
    reply = server.send("POST", CHAT, HELLO, headers)
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in reply.headers
    assert len(server.model.asked) == asked


def test_foreign_pages_may_not_even_read_the_health(server: RunningServer) -> None:
    assert server.send("GET", "/health", headers={"Origin": "https://evil.example"}).status == 403


@pytest.mark.parametrize(
    ("method", "path", "mode", "target", "status"),
    [
        ("GET", "/", "navigate", "document", 200),
        ("GET", "/", "navigate", "iframe", 403),
        ("GET", "/", "cors", "empty", 403),
        ("POST", "/", "navigate", "document", 403),
        ("GET", "/v1/models", "navigate", "document", 403),
    ],
)
def test_links_of_other_sites_may_lead_to_the_page(
    server: RunningServer, method: str, path: str, mode: str, target: str, status: int
) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": target}
    assert server.send(method, path, headers=headers).status == status


def test_own_pages_are_allowed(server: RunningServer) -> None:
    own = f"127.0.0.1:{server.port}"
    assert chat(server, Host=own, Origin=f"http://{own}", Sec_Fetch_Site="same-origin").status == 200


def test_an_allowed_origin_may_read_responses(open_to_app: RunningServer) -> None:
    reply = chat(open_to_app, Origin="https://app.example", Sec_Fetch_Site="cross-site", Authorization=f"Bearer {KEY}")
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    refused = chat(open_to_app, Origin="https://app.example")
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
    assert chat(open_to_app, Origin="https://app.example.evil.example").status == 403


def test_preflights_of_an_allowed_origin_need_no_key(open_to_app: RunningServer) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-a_b"}
    reply = open_to_app.send("OPTIONS", CHAT, headers={"Origin": "https://app.example", **asked})
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-headers"] == "authorization, x-a_b"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert open_to_app.send("OPTIONS", CHAT, headers={"Origin": "https://evil.example", **asked}).status == 403
    assert open_to_app.send("OPTIONS", CHAT, headers={"Authorization": f"Bearer {KEY}"}).status == 405


def test_any_origin_can_be_allowed() -> None:
    with serving(options=ServingOptions(origins=frozenset({"*"}))) as server:
        assert chat(server, Origin="app://obsidian.md").headers["access-control-allow-origin"] == "app://obsidian.md"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong-but-long-enough"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": "Bearer \xff"},
        {"x-api-key": KEY[:-1]},
    ],
)
def test_requests_without_a_valid_key_are_refused(locked: RunningServer, headers: dict[str, str]) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing/here")):
        reply = locked.send(method, path, HELLO if method == "POST" else None, headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert locked.model.asked == []


@pytest.mark.parametrize(
    "headers", [{"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer  {OTHER_KEY} "}, {"x-api-key": KEY}]
)
def test_every_key_in_the_file_is_valid(locked: RunningServer, headers: dict[str, str]) -> None:
    assert locked.send("GET", "/v1/models", headers=headers).status == 200


def test_health_is_public_and_metrics_only_on_request(locked: RunningServer) -> None:
    assert locked.send("GET", "/health").status == 200
    with serving(options=ServingOptions(keys=(KEY,), open_metrics=True)) as server:
        assert server.send("GET", "/metrics").status == 200
        assert server.send("GET", "/v1/models").status == 401


def test_each_key_is_a_tenant_of_its_own() -> None:
    with serving(options=ServingOptions(keys=(KEY, OTHER_KEY))) as server:
        for key in (KEY, OTHER_KEY, KEY):
            assert chat(server, Authorization=f"Bearer {key}").status == 200
        first, other, again = [asked.request.tenant for asked in server.model.asked]
        for call in ({"content": "a"}, {"content": "a", "with_pieces": True}):
            server.send("POST", "/tokenize", call, {"Authorization": f"Bearer {OTHER_KEY}"})
        server.send("POST", "/detokenize", {"tokens": [97]}, {"Authorization": f"Bearer {OTHER_KEY}"})
        callers = server.model.tenants
    assert first == again != other
    assert "" not in (first, other)
    assert KEY not in first
    assert callers == [other] * 4


def test_without_keys_all_requests_have_one_tenant() -> None:
    with serving() as server:
        chat(server, Authorization=f"Bearer {KEY}")
        chat(server, Authorization=f"Bearer {OTHER_KEY}")
        assert [asked.request.tenant for asked in server.model.asked] == ["", ""]


def test_keys_never_appear_in_logs_or_representations(locked: RunningServer) -> None:
    locked.send("GET", f"/v1/models?key={KEY}", headers={"Authorization": f"Bearer {KEY}"})
    assert KEY not in "".join(locked.log)
    assert KEY not in repr(ServingOptions(keys=(KEY,)))
