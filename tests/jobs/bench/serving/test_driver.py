"""Tests of the open and the closed loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading

import pytest

from llmrun.engine.remote.request import parse_endpoint
from llmrun.jobs.bench.serving.driving import Driver, Planned, Sender, retry_after
from tests.support.servers.fake_model import FakeModel
from tests.support.servers.hostile_server import HELLO, Asked, HangUp, response, serving


def planned(number: int = 0, **fields: object) -> Planned:
    body = {"stream": True, "prompt": f"p{number}", "max_tokens": 3} | fields
    return Planned("/completions", json.dumps(body).encode(), number)


async def driver_of(url: str) -> Driver:
    sender = Sender(parse_endpoint(url))
    await sender.connect()
    return Driver(sender)


def test_an_open_loop_sends_on_time_whatever_the_server_does() -> None:
    """The server answers nothing until it has all requests, which a closed loop would never send."""
    count = 40
    all_there = threading.Barrier(count)

    def script(asked: Asked, connection: socket.socket) -> None:
        all_there.wait(30)
        connection.sendall(response(HELLO))
        raise HangUp

    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.open_loop([planned(number) for number in range(count)], [0.0] * count)
        return driver

    with serving(script) as server:
        driver = asyncio.run(run())
    assert len(driver.ended) == count
    assert all(sent.last.status == 200 and not sent.last.problem for sent in driver.ended)


def test_requests_are_sent_in_the_order_of_their_times() -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.open_loop([planned(number) for number in range(5)], [0.0, 0.02, 0.04, 0.06, 0.08])
        return driver

    with serving(FakeModel()) as server:
        driver = asyncio.run(run())
    by_number = sorted(driver.ended, key=lambda sent: sent.planned.number)
    dues = [sent.due for sent in by_number]
    assert [later - earlier for earlier, later in itertools.pairwise(dues)] == pytest.approx([0.02] * 4, abs=1e-6)
    assert all(sent.tries[0].sent >= sent.due - 1e-3 for sent in by_number)


def test_a_closed_loop_keeps_its_number_of_clients() -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.closed_loop(map(planned, range(12)), 3)
        return driver

    model = FakeModel(slots=100)
    with serving(model) as server:
        driver = asyncio.run(run())
    assert sorted(sent.planned.number for sent in driver.ended) == list(range(12))
    assert model.most_running <= 3


def test_a_closed_loop_ends_after_its_duration() -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.closed_loop(map(planned, itertools.count()), 2, duration=0.1)
        return driver

    with serving(FakeModel()) as server:
        driver = asyncio.run(run())
    assert driver.ended
    assert all(not sent.last.problem for sent in driver.ended), "those that were running are completed"


def test_a_rejected_request_is_sent_again_after_its_wait() -> None:
    rejections = iter([True, True, False])

    def script(asked: Asked, connection: socket.socket) -> None:
        if next(rejections):
            connection.sendall(response(b"{}", status="429 No", kind="application/json", Retry_After="0.05"))
            raise HangUp
        connection.sendall(response(HELLO))
        raise HangUp

    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.open_loop([planned()], [0.0])
        return driver

    with serving(script) as server:
        (sent,) = asyncio.run(run()).ended
    assert [one.status for one in sent.tries] == [429, 429, 200]
    assert [one.retry_after for one in sent.tries] == [0.05, 0.05, None]
    assert all(later.sent - earlier.ended >= 0.049 for earlier, later in itertools.pairwise(sent.tries))
    assert len({asked.connection for asked in server.asked}) == 3


@pytest.mark.parametrize("headers", [{}, {"Retry_After": "soon"}, {"Retry_After": "-1"}, {"Retry_After": "1e9"}])
def test_without_a_wait_a_rejected_request_is_given_up(headers: dict[str, str]) -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.open_loop([planned()], [0.0])
        return driver

    with serving(response(b"{}", status="429 No", kind="application/json", **headers)) as server:
        (sent,) = asyncio.run(run()).ended
    assert [one.status for one in sent.tries] == [429]


def test_milliseconds_are_more_precise_than_seconds() -> None:
    assert retry_after({"retry-after": "2", "retry-after-ms": "1500"}) == 1.5
    assert retry_after({"retry-after": "2"}) == 2.0
    assert retry_after({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) is None
    assert retry_after({"retry-after": "nan"}) is None
