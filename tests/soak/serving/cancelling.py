"""Clients that leave in every phase of a request, and the steps that the engine still runs for them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.soak.serving.requests import CHAT
from tests.support.serving.logged_child import LOG_VARIABLE
from tests.support.serving.logged_serve import CLOSED_LOG_VARIABLE, COMMAND
from tests.support.serving.served import Served, serve

PHASES: Final = ("queue", "prefix", "prompt", "answer")
PARALLEL = 2
_LONG = "one two three four five six seven eight nine ten " * 60  # 600 tokens, or 3,000 for the scripted backend
_PATIENCE_S = 60.0
_MOST_LATE_STEPS = 1


@dataclass
class Left:
    """The outcome after clients had left.

    late         phase -> how many clients had rows in how many steps that began after the server had noticed that they
                 had left
    since_close  the same for all phases, after they had closed their connections. On a busy machine, the server notices
                 it some milliseconds later
    gone         how many steps began until the server no longer counted them, which it tells a moment later
    """

    late: dict[str, Counter[int]] = field(default_factory=dict)
    since_close: Counter[int] = field(default_factory=Counter)
    gone: Counter[int] = field(default_factory=Counter)

    @property
    def clients(self) -> int:
        return sum(sum(counts.values()) for counts in self.late.values())

    @property
    def too_late(self) -> int:
        """How many were not cancelled within one step."""
        return sum(n for counts in self.late.values() for steps, n in counts.items() if steps > _MOST_LATE_STEPS)

    @property
    def described(self) -> str:
        lines = [
            f"{phase}: steps after the server noticed: {dict(sorted(n.items()))}" for phase, n in self.late.items()
        ]
        lines.append(f"steps after they had closed their connections: {dict(sorted(self.since_close.items()))}")
        lines.append(f"steps until the server had forgotten them: {dict(sorted(self.gone.items()))}")
        return "\n".join([*lines, f"{self.clients} clients, {self.too_late} cancelled too late"])


class StepLog:
    """The log of an engine's steps, which grows while it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._steps: list[tuple[float, dict[str, bool]]] = []

    def steps(self) -> Sequence[tuple[float, dict[str, bool]]]:
        """Return all steps so far: when they began, and the requests in them with whether they were in their prompt."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self._steps += [(began, parts) for began, parts in map(json.loads, whole.splitlines())]
        return self._steps

    def phase(self, number: int, at: float = float("inf")) -> str:
        """Return where a request is: "queue" if it has never had rows, "prompt" or "answer"."""
        of_it = [parts[str(number)] for began, parts in self.steps() if str(number) in parts and began <= at]
        return "queue" if not of_it else "prompt" if of_it[-1] else "answer"


class LeavingSoak:
    """Lets clients leave, one after another, beside a request that keeps the engine busy.

    model  the arguments of `llmrun serve` that name the model
    """

    def __init__(self, model: Sequence[str], folder: Path, *, seed: int) -> None:
        self._model, self._folder = model, folder
        self._chance = random.Random(seed)
        self._number = 0

    def run(self, per_kind: int, say: Callable[[str], None] = lambda line: None) -> Left:
        """Let `per_kind` clients leave in each phase with a stream, and as many while they wait for a whole answer."""
        path, self._closed_path = self._folder / "steps.jsonl", self._folder / "closed.jsonl"
        path.touch()
        arguments = [*self._model, "--parallel", str(PARALLEL), "--ctx-size", "8192", "--max-wait", "600"]
        variables = {LOG_VARIABLE: str(path), CLOSED_LOG_VARIABLE: str(self._closed_path)}
        left = Left()
        with serve(*arguments, log=self._folder / "leaving.log", command=COMMAND, environment=variables) as server:
            self._server, self._log = server, StepLog(path)
            for phase in PHASES:
                for stream in (True, False):
                    asyncio.run(self._leave_often(phase, stream, per_kind, left))
                say(f"{phase}: {per_kind} streams and {per_kind} whole answers")
        return left

    async def _leave_often(self, phase: str, stream: bool, count: int, left: Left) -> None:
        kind = f"{phase}, {'stream' if stream else 'whole'}"
        left.late[kind] = Counter()
        # In the queue, all places must be taken, but otherwise one must be free.
        async with self._company(PARALLEL if phase == "queue" else PARALLEL - 1):
            while left.late[kind].total() < count:
                await self._leave(phase, kind, left, stream=stream)

    async def _leave(self, phase: str, kind: str, left: Left, *, stream: bool) -> None:
        """Let one client leave, and count the steps if it was in the right phase."""
        before = await self._known()
        round_number = self._new_number()
        text = f"round {round_number} {_LONG}"
        async with self._company(1 if phase == "prefix" else 0, text):
            number = self._new_number()
            line = await _begin(
                self._server, f"{text if phase != 'answer' else round_number} <{number}>", stream=stream
            )
            others = before + (phase == "prefix")
            await self._until_known(others + 1)
            if phase in ("prompt", "answer"):
                await _until(lambda: self._log.phase(number) in (phase, "answer"))
            await asyncio.sleep(self._chance.uniform(0.0, 0.06))
            port = line.getsockname()[1]
            _close(line, reset=self._chance.random() < 0.5)
            closed = time.monotonic()
            await self._until_known(others)
            forgotten = time.monotonic()
            await asyncio.sleep(0.05)
        noticed = self._noticed(port)
        was = self._log.phase(number, closed)
        if was != ("queue" if phase == "prefix" else phase):
            return  # it had gone on before it left
        steps = self._log.steps()
        left.late[kind][sum(str(number) in parts for began, parts in steps if began > noticed)] += 1
        left.since_close[sum(str(number) in parts for began, parts in steps if began > closed)] += 1
        left.gone[sum(closed < began < forgotten for began, _ in steps)] += 1

    @asynccontextmanager
    async def _company(self, count: int, text: str = "hello") -> AsyncIterator[None]:
        """Run requests that do not end by themselves while the block runs."""
        known = await self._known()
        numbers = [self._new_number() for _ in range(count)]
        lines = [await _begin(self._server, f"{text} <{number}>", stream=True) for number in numbers]
        for number in numbers:
            await _until(lambda number=number: self._log.phase(number) != "queue")  # type: ignore[misc]
        readers = [asyncio.create_task(_read_on(line)) for line in lines]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            for line in lines:
                _close(line, reset=True)
            await self._until_known(known)

    def _noticed(self, port: int) -> float:
        """Return when the server noticed that the last connection from this port was closed."""
        found = [time for time, client in map(json.loads, self._closed_path.read_text().splitlines()) if client == port]
        return float(found[-1])

    def _new_number(self) -> int:
        self._number += 1
        return self._number

    async def _known(self) -> int:
        """Return how many sequences the server knows, waiting or running."""
        metrics = await asyncio.to_thread(self._server.metrics)
        return int(metrics["requests_running"] + metrics["requests_waiting"])

    async def _until_known(self, count: int) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while await self._known() != count:
                await asyncio.sleep(0.001)


async def _begin(server: Served, text: str, *, stream: bool) -> socket.socket:
    """Send a request without an end, and return its connection."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 2.0,
        "seed": 1,
        "ignore_eos": True,
        "stream": stream,
    }
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    line = socket.create_connection(("127.0.0.1", server.port))
    line.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(
        line, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    )
    return line


async def _read_on(line: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(line, 65536):
        pass


def _close(line: socket.socket, *, reset: bool) -> None:
    """Close a connection as a program does that ends, or with a reset."""
    if reset:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
