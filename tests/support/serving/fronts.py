"""Servers with upstreams for tests, which ask their upstreams in quick succession."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from llmrun.engine.remote.request import parse_endpoint
from llmrun.serving.options import Limits, ServingOptions
from llmrun.serving.upstreams.front import Upstreams
from llmrun.serving.upstreams.pool import Pace
from llmrun.serving.upstreams.upstream import Upstream
from tests.support.servers import hostile_server
from tests.support.servers.hostile_server import Asked, HostileServer, Script, said
from tests.support.serving.fake_model import TIMEOUT_S, FakeModel
from tests.support.serving.fake_upstream import ANSWER, upstream
from tests.support.serving.servers import RunningServer, eventually, serving

QUICK = Pace(every_s=0.2, first_s=0.02, longest_s=0.1, answer_s=2.0, silent_s=0.5)


@contextmanager
def fronting(
    *urls: str,
    key: str | None = None,
    ping_s: float = 10.0,
    bodies_bytes: int = 1 << 20,
    pace: Pace = QUICK,
    client_keys: Sequence[str] = (),
    notes: list[str] | None = None,
    drain_s: float = 30.0,
    port: int = 0,
) -> Iterator[RunningServer]:
    """Run a server with the model "fake" and with upstreams at these URLs, and stop it at the end.

    key          of all upstreams
    client_keys  of the server's own clients
    notes        gets what the server says about its upstreams
    """
    said: list[str] = [] if notes is None else notes
    made = [Upstream(number, parse_endpoint(url), key) for number, url in enumerate(urls)]
    options = ServingOptions(keys=tuple(client_keys), limits=Limits(ping_s=ping_s, bodies_bytes=bodies_bytes))
    with serving(
        FakeModel(), options, drain_s=drain_s, port=port, upstreams=Upstreams(made, ping_s, said.append, pace)
    ) as server:
        assert server.ready.wait(TIMEOUT_S)
        yield server


@contextmanager
def behind(*answers: Script | bytes, traits: tuple[dict[str, Any], ...] = (), **options: Any) -> Iterator[Any]:
    """Run upstreams that answer like this and a server in front of them. Yield the server and the upstreams."""
    with ExitStack() as stack:
        given = [*traits, *[{}] * (len(answers) - len(traits))]
        scripts = [upstream(answer, **each) for answer, each in zip(answers, given, strict=True)]
        servers = [stack.enter_context(hostile_server.serving(script)) for script in scripts]
        front = stack.enter_context(fronting(*(f"http://127.0.0.1:{server.port}/v1" for server in servers), **options))
        yield front, *servers


def posts(server: HostileServer) -> list[Asked]:
    """Return the requests that a server has received, apart from questions whether it is up."""
    return [asked for asked in server.asked if asked.method == "POST"]


def last_line(front: RunningServer) -> str:
    """Return the line of the log about the only request, which is written after the response."""
    eventually(lambda: bool(front.log))
    return front.log[-1]


def numbered(first: int, *texts: str) -> list[bytes]:
    """Return events with IDs of an answer, which begin with a number."""
    return [f"id: {ANSWER}-{number}\n".encode() + said(text) for number, text in enumerate(texts, first)]
