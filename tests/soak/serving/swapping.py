"""Lets clients name three models in turn while only two of them fit in the server's memory."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from tests.support.serving.http_client import post
from tests.support.serving.served import Served, serve

CLIENTS: Final = 6
_NAMES: Final = ("first", "second", "third")
_QUESTIONS: Final = 5
_WATCH_S: Final = 0.1
_CONTEXT: Final = 2048


@dataclass
class Swapped:
    """The outcome of a run.

    swaps      models that were unloaded to make room for another one
    failed     requests whose status was not 200
    wrong      answers by another model than the named one, or with another text than that model gave alone
    limit      the memory for all models, in bytes
    peak       the most memory that all processes took together (proportional set size), in bytes
    """

    limit: int
    swaps: int = 0
    requests: int = 0
    failed: int = 0
    wrong: int = 0
    peak: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def described(self) -> str:
        return (
            f"{self.swaps} swaps, {self.requests} requests, {self.failed} failed, {self.wrong} wrong; at most "
            f"{self.peak / 1e9:.2f} GB of the limit of {self.limit / 1e9:.2f} GB in use"
        )


def run_swaps(
    model: Path, folder: Path, *, limit: int, swaps: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Swapped:
    """Serve three copies of a model under different names until `swaps` of them had to make room.

    limit  the memory for all models in bytes, which must be enough for two of them
    """
    copies = [folder / f"{name}.gguf" for name in _NAMES]
    for copy in copies:
        os.link(model, copy) if model.stat().st_dev == folder.stat().st_dev else copy.symlink_to(model)
    found = Swapped(limit)
    arguments = ["--parallel", "4", "--ctx-size", str(_CONTEXT), "--max-memory", str(limit / 1e9)]
    with serve(*map(str, copies), *arguments, log=folder / "swapped.log") as server:
        asyncio.run(_Swaps(server, found, seed, say).run(swaps))
    return found


class _Swaps:
    """The clients of one server."""

    def __init__(self, server: Served, found: Swapped, seed: int, say: Callable[[str], None]) -> None:
        self._server, self._found, self._seed, self._say = server, found, seed, say

    async def run(self, swaps: int) -> None:
        self._expected = [await self._ask(_NAMES[0], question) for question in range(_QUESTIONS)]
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(self._ask_on(number, swaps) for number in range(CLIENTS)))
        finally:
            watching.cancel()

    async def _ask_on(self, number: int, swaps: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while self._found.swaps < swaps and self._found.failed < CLIENTS:
            name, question = chance.choice(_NAMES), chance.randrange(_QUESTIONS)
            if await self._ask(name, question) != self._expected[question]:
                self._found.wrong += 1
                self._found.problems.append(f"another answer to question {question} by {name}")
            await asyncio.sleep(chance.uniform(0.0, 0.3))

    async def _ask(self, name: str, question: int) -> str:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": f"Count to {question + 5}."}],
            "max_tokens": 4 + 4 * question,
            "seed": 1,
        }
        exchange = await post(self._server.port, "/v1/chat/completions", body)
        self._found.requests += 1
        if exchange.status != 200:
            self._found.failed += 1
            self._found.problems.append(f"status {exchange.status}: {exchange.body[:300]!r}")
            return ""
        answer = json.loads(exchange.body)
        if answer["model"] != name:
            self._found.wrong += 1
            self._found.problems.append(f"{answer['model']} answered instead of {name}")
        return str(answer["choices"][0]["message"]["content"])

    async def _watch(self) -> None:
        """Measure the memory of all processes, and count the swaps."""
        while True:
            self._found.peak = max(self._found.peak, await asyncio.to_thread(self._memory))
            swaps = self._server.log.read_text().count("to make room for")
            if swaps != self._found.swaps:
                self._found.swaps = swaps
                self._say(self._found.described)
            await asyncio.sleep(_WATCH_S)

    def _memory(self) -> int:
        """Return the memory of the server and its children, in bytes. Pages that they share are counted once."""
        if sys.platform != "linux":
            raise NotImplementedError("needs /proc")
        total, front = 0, psutil.Process(self._server.process.pid)
        for process in (front, *front.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return total
