"""Tests of loops between servers, and of the models that servers list for each other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from starlette.datastructures import Headers

from llmrun.serving.refusals import Refused
from llmrun.serving.upstreams.pool import MOST_HOPS, Hops
from tests.support.servers.hostile_server import serving
from tests.support.servers.rpc_server import closed_port
from tests.support.serving.fake_upstream import MODEL, upstream, whole
from tests.support.serving.fronts import fronting
from tests.support.serving.servers import RunningServer, eventually


def via(*names: str) -> Headers:
    return Headers({"via": ", ".join(f"1.1 {name}" for name in names)})


def test_each_server_adds_its_name() -> None:
    first, second = Hops(), Hops()
    assert first.via(Headers({})) == first.first_via() == f"1.1 {first.name}"
    passed = second.via(Headers({"via": f"1.0 proxy, {first.first_via()}"}))
    assert passed == f"1.1 {first.name}, 1.1 {second.name}"


def test_requests_that_come_back_are_refused() -> None:
    first, second = Hops(), Hops()
    passed = second.via(Headers({"via": first.first_via()}))
    with pytest.raises(Refused, match="came back to this server") as refused:
        first.via(Headers({"via": passed}))
    assert (refused.value.status, refused.value.error.code) == (508, "loop_detected")


def test_names_in_several_lines_count_together() -> None:
    names = [Hops().name for _ in range(MOST_HOPS)]
    lines = [(b"via", f"1.1 {name}".encode()) for name in names]
    Hops().via(Headers(raw=lines[1:]))
    with pytest.raises(Refused, match=f"has passed {MOST_HOPS} servers"):
        Hops().via(Headers(raw=lines))


def listed_by(server: Hops, model: dict[str, Any], asker: Hops) -> dict[str, Any]:
    return server.shown_to(Headers({"via": asker.first_via()}), model)


def test_only_servers_see_the_names_on_the_way() -> None:
    first, second = Hops(), Hops()
    model = listed_by(second, {"id": "m"}, first)
    assert model == {"id": "m", "via": [second.name]}
    assert first.shown_to(Headers({}), model) == {"id": "m"}


def test_models_that_lead_back_are_ignored() -> None:
    first, second, third = Hops(), Hops(), Hops()
    model = listed_by(second, listed_by(first, {"id": "m"}, second), third)
    assert model["via"] == [second.name, first.name]
    assert first.leads_back(model)
    assert not third.leads_back(model)


@pytest.mark.parametrize("names", [None, 5, "llmrun", [1, None]])
def test_malformed_names_on_the_way_are_ignored(names: Any) -> None:
    assert not Hops().leads_back({"id": "m", "via": names})


@pytest.mark.push
def test_servers_can_forward_to_each_other() -> None:
    """The first one finds a model of the second one's upstream. When that is gone, neither lists the model any more."""
    port = closed_port()
    with fronting(f"http://127.0.0.1:{port}") as first:
        stack = ExitStack()
        source = stack.enter_context(serving(upstream(whole())))
        urls = (f"http://127.0.0.1:{first.port}", f"http://127.0.0.1:{source.port}")
        with fronting(*urls, port=port) as second:
            assert names(second) == ["fake", MODEL]
            eventually(lambda: names(first) == ["fake", MODEL])
            assert first.chat(model=MODEL).status == 200
            (asked,) = [one for one in source.asked if one.method == "POST"]
            assert asked.headers["via"].count("llmrun-") == 2
            stack.close()
            eventually(lambda: names(first) == names(second) == ["fake"])


def names(server: RunningServer) -> list[str]:
    return [model["id"] for model in server.send("GET", "/v1/models").json["data"]]


def test_a_loop_is_reported_in_one_sentence() -> None:
    with serving(upstream(whole())) as server, fronting(f"http://127.0.0.1:{server.port}") as front:
        assert front.chat(model=MODEL).status == 200
        name = next(one.headers["via"] for one in server.asked if one.method == "POST")
        reply = front.send("POST", "/v1/chat/completions", {"model": MODEL, "messages": []}, {"Via": name})
        assert (reply.status, reply.error["code"]) == (508, "loop_detected")
        assert "remove one --upstream" in reply.error["message"]
