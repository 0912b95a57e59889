"""Counts the steps that the engine runs for clients that have left, in every phase of a request."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.soak.driver import Broken, Case, Soak
from tests.support.batching.batch_runs import CHAT
from tests.support.serving.logged_child import LOG_VARIABLE
from tests.support.serving.logged_serve import CLOSED_LOG_VARIABLE, COMMAND
from tests.support.serving.processes import until
from tests.support.serving.served import Served, serve
from tests.support.serving.servers import post

_PHASES = ("queue", "prefix", "prompt", "answer")
_PARALLEL = 2
_LONG = "one two three four five six seven eight nine ten " * 60  # 600 tokens, or 3,000 for the scripted backend
_MOST_LATE_STEPS = 1


def cancel(soak: Soak) -> Iterator[Case]:
    """Let a client leave in one of four phases, in a stream or while it waits for a complete answer."""
    steps, closed = soak.folder / "steps.jsonl", soak.folder / "closed.jsonl"
    arguments = [*soak.model_arguments(0.02), "--parallel", str(_PARALLEL), "--ctx-size", "8192", "--max-wait", "600"]
    variables = {LOG_VARIABLE: str(steps), CLOSED_LOG_VARIABLE: str(closed)}
    with serve(*arguments, log=soak.folder / "leaving.log", command=COMMAND, environment=variables) as server:
        leaving = _Leaving(server, steps, closed)

        def case(number: int) -> str:
            kind, phase = divmod(number, len(_PHASES))
            for log in (steps, closed):
                log.write_bytes(b"")  # short logs are read quickly; their writers append
            return asyncio.run(leaving.leave(_PHASES[phase], soak.random(number), stream=kind % 2 == 0))

        yield case


class _Leaving:
    """Lets clients leave, one after another, while another request keeps the engine busy."""

    def __init__(self, server: Served, steps: Path, closed: Path) -> None:
        self._server, self._steps, self._closed = server, steps, closed
        self._number = 0

    async def leave(self, phase: str, chance: random.Random, *, stream: bool) -> str:
        """Let a client leave, and count the steps that ran for it after the server had noticed.

        The steps are not checked if the request had left the phase before its client left.
        """
        # A request stays in the queue only while others take all places.
        async with self._company(_PARALLEL if phase == "queue" else _PARALLEL - 1):
            others = await self._known() + (phase == "prefix")
            topic = f"round {self._new_number()}"
            text = f"{topic} {_LONG}"
            async with self._company(1 if phase == "prefix" else 0, text):
                number = self._new_number()
                line = await self._begin(f"{topic if phase == 'answer' else text} <{number}>", stream=stream)
                await self._until_known(others + 1)
                if phase in ("prompt", "answer"):
                    await until(lambda: self._phase(number) in (phase, "answer"))
                await asyncio.sleep(chance.uniform(0.0, 0.06))
                port = line.getsockname()[1]
                _close(line, reset=chance.random() < 0.5)
                closed = time.monotonic()
                await self._until_known(others)
                await asyncio.sleep(0.05)
        if self._phase(number, closed) != ("queue" if phase == "prefix" else phase):
            return "moved on before the client left"
        # On a busy machine, the server notices some milliseconds later that a connection was closed.
        noticed = [at for at, client in _lines(self._closed) if client == port][-1]
        late = sum(str(number) in parts for began, parts in _lines(self._steps) if began > noticed)
        if late > _MOST_LATE_STEPS:
            raise Broken(f"{late} steps after the server noticed, in the phase {phase}")
        return f"{phase}, {'stream' if stream else 'whole'}: {late} steps"

    @asynccontextmanager
    async def _company(self, count: int, text: str = "hello") -> AsyncIterator[None]:
        """Run requests that do not end by themselves while the block runs."""
        known = await self._known()
        numbers = [self._new_number() for _ in range(count)]
        lines = [await self._begin(f"{text} <{number}>", stream=True) for number in numbers]
        for number in numbers:
            await until(lambda number=number: self._phase(number) != "queue")  # type: ignore[misc]
        readers = [asyncio.create_task(self._read_on(line)) for line in lines]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            for line in lines:
                _close(line, reset=True)
            await self._until_known(known)

    async def _begin(self, text: str, *, stream: bool) -> socket.socket:
        """Send a request whose answer does not end by itself, and return the connection."""
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "temperature": 2.0, "seed": 1, "ignore_eos": True, "stream": stream}
        line = socket.create_connection(("127.0.0.1", self._server.port))
        line.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(line, post(CHAT, body))
        return line

    async def _read_on(self, line: socket.socket) -> None:
        while await asyncio.get_running_loop().sock_recv(line, 65536):
            continue

    def _phase(self, number: int, at: float = float("inf")) -> str:
        """Return the phase of a request: "queue" until it gets rows in a step, then "prompt", then "answer"."""
        steps = [parts[str(number)] for began, parts in _lines(self._steps) if str(number) in parts and began <= at]
        return "queue" if not steps else "prompt" if steps[-1] else "answer"

    def _new_number(self) -> int:
        self._number += 1
        return self._number

    async def _known(self) -> int:
        """Return how many requests are waiting or running on the server."""
        metrics = await asyncio.to_thread(self._server.metrics)
        return int(metrics["requests_running"] + metrics["requests_waiting"])

    async def _until_known(self, count: int) -> None:
        while await self._known() != count:
            await asyncio.sleep(0.001)


def _lines(log: Path) -> list[Any]:
    """Return the complete lines of a log, whose last line may still be written."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _close(line: socket.socket, *, reset: bool) -> None:
    """Close a connection, with a reset or as a program does that ends."""
    if reset:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()
