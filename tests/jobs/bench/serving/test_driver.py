"""Tests of the open and the closed loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading

import pytest

from llmrun.engine.remote.request import parse_endpoint
from llmrun.jobs.bench.serving.driving import Driver, Sender
from tests.support.servers.fake_model import FakeModel
from tests.support.servers.hostile_server import HELLO, Asked, HangUp, response, serving


def content(number: int = 0) -> bytes:
    return json.dumps({"stream": True, "prompt": f"p{number}", "max_tokens": 3}).encode()


async def driver_of(url: str) -> Driver:
    sender = Sender(parse_endpoint(url))
    await sender.connect()
    return Driver(sender, "/completions")


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
        await driver.open_loop([content(number) for number in range(count)], [0.0] * count)
        return driver

    with serving(script) as server:
        driver = asyncio.run(run())
    assert len(driver.ended) == count
    assert all(sent.status == 200 and not sent.problem for sent in driver.ended)


def test_requests_are_sent_in_the_order_of_their_times() -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.open_loop([content(number) for number in range(5)], [0.0, 0.02, 0.04, 0.06, 0.08])
        return driver

    with serving(FakeModel()) as server:
        driver = asyncio.run(run())
    dues = sorted(sent.due for sent in driver.ended)
    assert [later - earlier for earlier, later in itertools.pairwise(dues)] == pytest.approx([0.02] * 4, abs=1e-6)
    assert all(sent.sent >= sent.due - 1e-3 for sent in driver.ended)


def test_a_closed_loop_keeps_its_number_of_clients() -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.closed_loop(map(content, range(12)), 3)
        return driver

    model = FakeModel(slots=100)
    with serving(model) as server:
        driver = asyncio.run(run())
    assert len(driver.ended) == 12
    assert sorted(body["prompt"] for body in model.bodies) == sorted(f"p{number}" for number in range(12))
    assert model.most_running <= 3


def test_a_closed_loop_ends_after_its_duration() -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.closed_loop(map(content, itertools.count()), 2, duration=0.1)
        return driver

    with serving(FakeModel()) as server:
        driver = asyncio.run(run())
    assert driver.ended
    assert all(not sent.problem for sent in driver.ended), "those that were running are completed"


def test_a_rejected_request_is_not_sent_again() -> None:
    async def run() -> Driver:
        driver = await driver_of(server.url)
        await driver.open_loop([content()], [0.0])
        return driver

    with serving(response(b"{}", status="429 No", kind="application/json", Retry_After="0.05")) as server:
        (sent,) = asyncio.run(run()).ended
    assert sent.status == 429
    assert len(server.asked) == 1
