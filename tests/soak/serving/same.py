"""Asks a server the same requests alone, in company, with preemptions, with warm caches and with killed engines."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from llmrun.bench.serving.exchange import Exchange
from tests.soak.serving.comparing import Incomplete, comparable
from tests.soak.serving.requests import TEMPLATE, Asked
from tests.support.serving.http_client import post_patiently
from tests.support.serving.served import Served, serve

_BEAT_S = 0.7  # a little longer than the time between two heartbeats of the engine


@dataclass
class Condition:
    """The outcome under one condition.

    evidence  figures that show that the condition was real
    """

    name: str
    answers: int = 0
    failed: int = 0
    different: int = 0
    evidence: dict[str, int] = field(default_factory=dict)

    @property
    def described(self) -> str:
        evidence = ", ".join(f"{value:,} {name}" for name, value in self.evidence.items())
        return f"{self.name}: {self.answers} answers, {self.failed} failed, {self.different} differ ({evidence})"


@dataclass
class Sameness:
    """The result: what happened under each condition, and the first problems in words."""

    conditions: list[Condition] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(one.failed + one.different for one in self.conditions)


class SameSoak:
    """Runs all conditions with the same requests.

    model      the arguments of `llmrun serve` that name the model
    folder     for logs and templates
    context    the context size; with preemptions, the cache has no more tokens than that for all requests together
    per_fresh  how many requests each of the fresh servers answers, one after another
    at_once    how many requests run at a time in company
    say        called with a line after each condition
    """

    def __init__(
        self,
        model: Sequence[str],
        asked: Sequence[Asked],
        folder: Path,
        *,
        context: int = 1024,
        per_fresh: int = 1,
        at_once: int = 16,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        self._arguments = [*model, "--ctx-size", str(context), "--chat-template", str(template), "--max-wait", "600"]
        self._asked, self._folder, self._per_fresh, self._at_once = asked, folder, per_fresh, at_once
        self._context, self._say = context, say
        self._expected: list[str] = []
        self._result = Sameness()

    def run(self) -> Sameness:
        """Run all conditions."""
        self._alone()
        with self._server("company") as server:
            self._in_company(server, "at once")
            self._in_company(server, "prefixes cached")
        with self._server("preempted", "--overcommit", "--kv-tokens", str(self._context)) as server:
            self._in_company(server, "preempted")
        with self._server("killed") as server:
            self._killed(server)
        return self._result

    def _server(self, name: str, *more: str) -> AbstractContextManager[Served]:
        return serve(*self._arguments, *more, log=self._folder / f"{name}.log")

    def _alone(self) -> None:
        condition = self._begin("alone")
        condition.evidence = {"servers": 0, "cached tokens": 0}
        for first in range(0, len(self._asked), self._per_fresh):
            with self._server("alone") as server:
                for asked in self._asked[first : first + self._per_fresh]:
                    self._expected.append(self._take(condition, asked, asyncio.run(_post(server, asked)), None))
                condition.evidence["servers"] += 1
                condition.evidence["cached tokens"] += int(settled_metrics(server)["cached_tokens_total"])
        self._say(condition.described)

    def _in_company(self, server: Served, name: str) -> None:
        condition = self._begin(name)
        before = settled_metrics(server)
        most_running = asyncio.run(self._ask_all(server, condition))
        after = settled_metrics(server)
        counts = ("cached_tokens", "preemptions", "engine_restarts")
        found = {count.replace("_", " "): int(after[f"{count}_total"] - before[f"{count}_total"]) for count in counts}
        condition.evidence = {"at most at a time": most_running, **found}
        self._say(condition.described)

    async def _ask_all(self, server: Served, condition: Condition) -> int:
        """Ask everything in random order. Returns how many sequences ran at a time, at most."""
        numbers = list(range(len(self._asked)))
        random.Random(condition.name).shuffle(numbers)
        room = asyncio.Semaphore(self._at_once)
        most = 0

        async def ask(number: int) -> None:
            async with room:
                exchange = await _post(server, self._asked[number])
            self._take(condition, self._asked[number], exchange, self._expected[number])

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, int((await asyncio.to_thread(server.metrics))["requests_running"]))
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        try:
            await asyncio.gather(*map(ask, numbers))
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        return most

    def _killed(self, server: Served) -> None:
        condition = self._begin("engine killed")
        condition.evidence = {"kills": 0, "in progress at a kill": 0}
        size = 2 * self._at_once  # so that some of the requests are in the queue
        for first in range(0, len(self._asked), size):
            asyncio.run(self._wave(server, condition, range(first, min(first + size, len(self._asked)))))
        condition.evidence["restarts"] = int(settled_metrics(server)["engine_restarts_total"])
        self._say(condition.described)

    async def _wave(self, server: Served, condition: Condition, numbers: range) -> None:
        """Ask some requests at once, and kill the engine in the middle. Each of them sees one kill at most."""
        chance = random.Random(numbers.start)
        await asyncio.to_thread(server.wait_until_ready)
        tasks = {number: asyncio.create_task(_post(server, self._asked[number])) for number in numbers}
        while not (await asyncio.to_thread(server.metrics))["requests_running"]:
            await asyncio.sleep(0.001)
        done = chance.randrange(1 + len(tasks) // 2)
        while sum(task.done() for task in tasks.values()) < done:
            await asyncio.sleep(0.001)
        condition.evidence["in progress at a kill"] += sum(not task.done() for task in tasks.values())
        condition.evidence["kills"] += server.kill_engine()
        for number, task in tasks.items():
            self._take(condition, self._asked[number], await task, self._expected[number])

    def _begin(self, name: str) -> Condition:
        self._result.conditions.append(Condition(name))
        return self._result.conditions[-1]

    def _take(self, condition: Condition, asked: Asked, exchange: Exchange, expected: str | None) -> str:
        """Count an answer, compare it with the expected one if there is one, and return it in comparable form."""
        condition.answers += 1
        try:
            found = comparable(exchange)
        except Incomplete as error:
            condition.failed += 1
            self._result.problems.append(f"{condition.name}: {error}: {asked.described}")
            return str(error)
        if expected not in (None, found):
            condition.different += 1
            self._result.problems.append(f"{condition.name}: {asked.described}\n  {expected}\n  {found}")
        return found


async def _post(server: Served, asked: Asked) -> Exchange:
    return await post_patiently(server.port, asked.path, asked.body)


def settled_metrics(server: Served) -> Mapping[str, float]:
    """Return the metrics once they include the last step."""
    time.sleep(_BEAT_S)
    return server.metrics()
