"""Ends one of two servers at random moments, behind a server that forwards to them, and compares the answers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from llmrun.bench.serving.exchange import Exchange
from tests.soak.serving.comparing import Incomplete, comparable
from tests.soak.serving.requests import Asked
from tests.support.serving.http_client import post
from tests.support.serving.restartable import Restartable
from tests.support.serving.served import Served, serve

CLIENTS: Final = 12
_SERVERS: Final = 2
_PAUSE_S: Final = 1.0  # the longest time between the moment when both servers are up and a kill
_GENTLE: Final = 0.25  # the share of servers that are stopped with a signal that they notice
_EVENT_ID: Final = re.compile(rb"^id: (\S+)-(\d+)$", re.MULTILINE)


@dataclass
class Moved:
    """The outcome of a run.

    moved      requests that another server answered from the beginning
    resumed    streams that another server continued
    cut        streams without IDs that ended with an error after their first token, which is allowed
    failed     all other requests that failed
    different  answers that differ from those of a server that nobody killed
    """

    kills: int = 0
    stops: int = 0
    requests: int = 0
    streams: int = 0
    moved: int = 0
    resumed: int = 0
    cut: int = 0
    failed: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def described(self) -> str:
        return (
            f"{self.kills} kills, {self.stops} stops, {self.requests} requests ({self.streams} streamed): "
            f"{self.moved} moved before their first token, {self.resumed} resumed after it, {self.cut} without IDs cut "
            f"after it; {self.failed} failed, {self.different} differ"
        )


def run_upstream_kills(
    model: Sequence[str],
    asked: Sequence[Asked],
    folder: Path,
    *,
    kills: int,
    seed: int,
    context: int = 1024,
    say: Callable[[str], None] = lambda line: None,
) -> Moved:
    """Kill one of two servers `kills` times while clients of a third one ask one request after another.

    model  the arguments of `llmrun serve` that name the model
    """
    arguments = [*model, "--ctx-size", str(context), "--max-wait", "600"]
    with ExitStack() as stack:
        servers = [Restartable(arguments, folder / f"upstream-{number}.log") for number in range(_SERVERS)]
        for server in servers:
            stack.callback(server.close)
        flags = [word for server in servers for word in ("--upstream", server.url)]
        front = stack.enter_context(serve(*flags, log=folder / "front.log"))
        model_name = json.loads(servers[0].server.get("/v1/models")[1])["data"][0]["id"]
        named = [replace(one, body={**one.body, "model": model_name}) for one in asked]
        soak = _Kills(front, servers, named, random.Random(seed), say)
        asyncio.run(soak.run(kills))
        return soak.found


class _Kills:
    """The clients and the killer."""

    def __init__(
        self,
        front: Served,
        servers: Sequence[Restartable],
        asked: Sequence[Asked],
        chance: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self._front, self._servers, self._asked, self._chance, self._say = front, servers, asked, chance, say
        self._is_over = False
        self.found = Moved()

    async def run(self, kills: int) -> None:
        port = self._servers[0].port
        answers = await asyncio.gather(*(post(port, one.path, one.body) for one in self._asked))
        self._expected = list(map(comparable, answers))
        clients = [asyncio.create_task(self._ask_on(number)) for number in range(CLIENTS)]
        try:
            while self.found.kills < kills:
                await self._until_all_are_up()
                await asyncio.sleep(self._chance.uniform(0.0, _PAUSE_S))
                victim = self._chance.choice(self._servers)
                is_gentle = self._chance.random() < _GENTLE
                await asyncio.to_thread(victim.stop if is_gentle else victim.kill)
                self.found.kills += not is_gentle
                self.found.stops += is_gentle
                await asyncio.sleep(self._chance.uniform(0.0, _PAUSE_S))
                await asyncio.to_thread(victim.restart)
                self._say(self.found.described)
        finally:
            self._is_over = True
            await asyncio.gather(*clients)
        metrics = (await asyncio.to_thread(self._front.get, "/metrics"))[1].decode()
        self.found.moved, self.found.resumed = _total(metrics, "moved"), _total(metrics, "resumed")

    async def _until_all_are_up(self) -> None:
        deadline = time.monotonic() + 60.0
        while _total((await asyncio.to_thread(self._front.get, "/metrics"))[1].decode(), "up") < len(self._servers):
            assert time.monotonic() < deadline, "a restarted upstream did not come back"
            await asyncio.sleep(0.02)

    async def _ask_on(self, number: int) -> None:
        while not self._is_over:
            number = (number + CLIENTS - 1) % len(self._asked)
            self._judge(number, await post(self._front.port, self._asked[number].path, self._asked[number].body))

    def _judge(self, number: int, exchange: Exchange) -> None:
        found, asked = self.found, self._asked[number]
        found.requests += 1
        found.streams += bool(asked.body.get("stream"))
        try:
            if comparable(exchange) != self._expected[number] or not _ids_are_whole(exchange.body):
                found.different += 1
                found.problems.append(f"another answer: {asked.described}: {exchange.body[-2000:].decode()}")
        except Incomplete as error:
            if asked.body.get("stream") and not _EVENT_ID.search(exchange.body) and b'"finish_reason"' in exchange.body:
                found.cut += 1
            else:
                found.failed += 1
                found.problems.append(f"{error}: {asked.described}")


def _ids_are_whole(body: bytes) -> bool:
    """Return whether the events of a stream have the numbers 1, 2, 3 and so on, if they have any."""
    ids = _EVENT_ID.findall(body)
    numbers = [int(number) for _, number in ids]
    return numbers == list(range(1, len(numbers) + 1)) and len({prefix for prefix, _ in ids}) <= 1


def _total(metrics: str, name: str) -> int:
    """Return the sum of a metric over all upstreams."""
    found = re.findall(rf"^llmrun_upstream_{name}(?:_total)?\{{.*\}} (\d+)$", metrics, re.MULTILINE)
    return sum(map(int, found))
