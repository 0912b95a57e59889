"""Kills the engine of a real server at random moments under load, and compares the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.soak.serving.comparing import Incomplete, comparable
from tests.soak.serving.requests import Asked
from tests.soak.serving.same import settled_metrics
from tests.support.serving.http_client import post_patiently
from tests.support.serving.served import Served, serve

CLIENTS: Final = 24  # more than run at a time, so that some requests are in the queue
_PARALLEL: Final = 16
_SOON: Final = 0.2  # how many of the kills do not wait until the requests that saw the previous one are over


@dataclass
class Killed:
    """The outcome of a run.

    hit         requests in progress at exactly one kill
    hit_twice   requests in progress at several kills
    given_up    those of them that failed, which is allowed
    failed      other requests that failed
    different   answers that differ from those without kills
    """

    kills: int = 0
    restarts: int = 0
    requests: int = 0
    hit: int = 0
    hit_twice: int = 0
    given_up: int = 0
    failed: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def described(self) -> str:
        return (
            f"{self.kills} kills, {self.restarts} restarts, {self.requests} requests: {self.hit} were hit by one kill, "
            f"{self.hit_twice} by several, of which {self.given_up} failed; of the others, {self.failed} failed; "
            f"{self.different} differ"
        )


def run_kills(
    model: Sequence[str],
    asked: Sequence[Asked],
    folder: Path,
    *,
    kills: int,
    per_server: int,
    seed: int,
    context: int = 1024,
    say: Callable[[str], None] = lambda line: None,
) -> Killed:
    """Kill the engine `kills` times while clients ask one request after another.

    per_server  kills until a new server is started. The pauses before restarts grow up to 30 s
    """
    found, chance = Killed(), random.Random(seed)
    arguments = ["--parallel", str(_PARALLEL), "--ctx-size", str(context), "--max-wait", "600"]
    while found.kills < kills:
        with serve(*model, *arguments, log=folder / "killed.log") as server:
            soak = _Kills(server, asked, found, chance)
            asyncio.run(soak.run(min(per_server, kills - found.kills)))
            found.restarts += int(settled_metrics(server)["engine_restarts_total"])
        say(found.described)
    return found


class _Kills:
    """The clients and the killer of one server."""

    def __init__(self, server: Served, asked: Sequence[Asked], found: Killed, chance: random.Random) -> None:
        self._server, self._asked, self._found, self._chance = server, asked, found, chance
        self._times: list[float] = []
        self._in_progress: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self, kills: int) -> None:
        self._expected = [
            comparable(await post_patiently(self._server.port, one.path, one.body)) for one in self._asked
        ]
        clients = [asyncio.create_task(self._ask_on(number)) for number in range(CLIENTS)]
        try:
            while len(self._times) < kills:
                await asyncio.to_thread(self._server.wait_until_ready)
                await asyncio.sleep(self._chance.uniform(0.0, 1.5))
                now, hit = time.perf_counter(), set(self._in_progress)
                if self._server.kill_engine():
                    self._times.append(now)
                    self._found.kills += 1
                    await self._until_down()
                if self._chance.random() > _SOON:
                    await asyncio.wait(hit)
        finally:
            self._is_over = True
            await asyncio.gather(*clients)

    async def _until_down(self) -> None:
        while (await asyncio.to_thread(self._server.get, "/health"))[0] == 200:
            await asyncio.sleep(0.005)

    async def _ask_on(self, first: int) -> None:
        number = first
        while not self._is_over:
            number = (number + CLIENTS - 1) % len(self._asked)
            task = asyncio.create_task(self._ask(number))
            self._in_progress.add(task)
            task.add_done_callback(self._in_progress.discard)
            await task

    async def _ask(self, number: int) -> None:
        """Ask one request, and count how many kills it saw."""
        found, asked = self._found, self._asked[number]
        exchange = await post_patiently(self._server.port, asked.path, asked.body)
        hits = sum(exchange.sent <= at <= exchange.ended for at in self._times)
        found.requests += 1
        found.hit += hits == 1
        found.hit_twice += hits > 1
        try:
            if comparable(exchange) != self._expected[number]:
                found.different += 1
                found.problems.append(f"another answer after {hits} kills: {asked.described}")
        except Incomplete as error:
            if hits > 1:
                found.given_up += 1
            else:
                found.failed += 1
                found.problems.append(f"failed after {hits} kills: {error}: {asked.described}")
