"""Hostile clients in a process of their own: `python -m tests.soak.serving.attacks PORT KEY SEED SECONDS IDLE`.

It prints one line of JSON: how often each attack ran, the statuses of the responses, and responses that must not occur.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tests.soak.serving.hostile_bodies import hostile_body, mutated_bytes, valid_body

_QUICK_WORKERS: Final = 12
_SLOW_WORKERS: Final = 20
_BURST: Final = 1200  # connections, more than the server allows
_MB: Final = 1 << 20
_PATIENCE_S: Final = 20.0  # each attack ends after this time
_PAUSE_S: Final = 0.05  # after an attack that failed
_OPEN_FILES: Final = 4096
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3})")
# What a server may answer to a hostile client. Above all, 500 is missing.
_EXPECTED: Final = frozenset((100, 200, 204, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 501, 503))

Kinds = dict[str, tuple[int, Callable[[], Awaitable[None]]]]  # name -> relative frequency, and the attack


@dataclass
class Attacked:
    """The outcome of the attacks."""

    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)


class Line:
    """One connection, without any help from an HTTP library."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read(self) -> bytes:
        """Read until the server closes the connection, but not more than 4 MB."""
        parts = bytearray()
        while (part := await self.reader.read(65536)) and len(parts) < 4 * _MB:
            parts += part
        return bytes(parts)

    def close(self, *, reset: bool = False) -> None:
        connection = self.writer.get_extra_info("socket")
        if reset and connection is not None:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort() if reset else self.writer.close()


class Attacks:
    """All attacks against one server."""

    def __init__(self, port: int, key: str, seed: int) -> None:
        self._port, self._key = port, key
        self._chance = random.Random(seed)
        self._bursting = asyncio.Lock()
        self.found = Attacked()
        self._quick: Kinds = {
            "hostile body": (30, self.hostile_body),
            "reset": (15, self.reset),
            "mutated request": (10, self.mutated_request),
            "random bytes": (5, self.random_bytes),
            "odd HTTP": (8, self.odd_http),
            "huge header": (4, self.huge_header),
            "many requests at once": (3, self.pipelined),
            "100 MB declared": (3, self.large_declared),
            "100 MB in chunks": (3, self.large_chunked),
        }
        self._slow: Kinds = {
            "slow header": (4, self.slow_header),
            "slow body": (4, self.slow_body),
            "slow reader": (6, self.slow_reader),
            "stalled large body": (10, self.stalled_large_body),
            "connections in a burst": (1, self.burst),
        }

    async def run(self, seconds: float, idle: int) -> Attacked:
        """Attack for some seconds, and hold `idle` connections open that send nothing."""
        deadline = time.monotonic() + seconds
        kinds = [self._quick] * _QUICK_WORKERS + [self._slow] * _SLOW_WORKERS
        workers = [asyncio.create_task(self._attack_on(deadline, each)) for each in kinds]
        holding = asyncio.create_task(self._hold(idle))
        await asyncio.gather(*workers)
        holding.cancel()
        await asyncio.wait({holding})
        return self.found

    async def _attack_on(self, deadline: float, kinds: Kinds) -> None:
        weights = [weight for weight, _ in kinds.values()]
        while time.monotonic() < deadline:
            [name] = self._chance.choices([*kinds], weights)
            self.found.attacks[name] += 1
            try:
                async with asyncio.timeout(min(_PATIENCE_S, max(1.0, deadline - time.monotonic()))):
                    await kinds[name][1]()
            except OSError as error:  # also TimeoutError
                self.found.attacks[f"ended by {errno.errorcode.get(error.errno or 0, type(error).__name__)}"] += 1
                await asyncio.sleep(_PAUSE_S)

    async def _hold(self, idle: int) -> None:
        """Keep connections open, and open new ones for those that the server closes."""
        lines: list[Line] = []
        try:
            while True:
                lines = [line for line in lines if not line.reader.at_eof() and not line.writer.is_closing()]
                for _ in range(min(100, idle - len(lines))):
                    lines.append(await self._connect())
                await asyncio.sleep(0.1)
        finally:
            for line in lines:
                line.close(reset=True)

    async def _connect(self, receive_bytes: int = 0) -> Line:
        connection = socket.socket()
        connection.setblocking(False)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
            return Line(*await asyncio.open_connection(sock=connection, limit=receive_bytes or 65536))
        except BaseException:
            connection.close()
            raise

    @contextmanager
    def _closing(self, line: Line) -> Iterator[Line]:
        try:
            yield line
        finally:
            line.close(reset=self._chance.random() < 0.5)

    def _request(self, path: str, body: bytes, *, more: str = "", length: str | None = None) -> bytes:
        length = f"Content-Length: {len(body)}\r\n" if length is None else length
        return (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._key}\r\n{length}{more}\r\n"
        ).encode("latin-1") + body

    def _take(self, answer: bytes, sent: bytes) -> None:
        """Check the responses of a connection."""
        for found in _STATUS.finditer(answer):
            status = int(found[1])
            self.found.statuses[status] += 1
            if status not in _EXPECTED:
                self.found.unexpected.append(f"{answer[:300]!r} for {sent[:3000]!r}")

    async def _exchange(self, data: bytes, *more: bytes) -> None:
        """Send some data, read while sending it, and check the response."""
        with self._closing(await self._connect()) as line:
            sending = asyncio.create_task(_send_all(line, (data, *more)))
            try:
                answer = await line.read()
            finally:
                sending.cancel()
                await asyncio.wait({sending})
            self._take(answer, data)

    async def hostile_body(self) -> None:
        path, body = hostile_body(self._chance)
        await self._exchange(self._request(path, body, more="Connection: close\r\n"))

    async def mutated_request(self) -> None:
        path, body = valid_body(self._chance)
        await self._exchange(mutated_bytes(self._chance, self._request(path, body, more="Connection: close\r\n")))

    async def random_bytes(self) -> None:
        await self._exchange(self._chance.randbytes(self._chance.randint(1, 100_000)) + b"\r\n\r\n")

    async def reset(self) -> None:
        """Leave at a random moment: in the body, in the queue, in the prompt or in the answer."""
        data = self._request(*valid_body(self._chance))
        line = await self._connect()
        try:
            await line.send(data[: self._chance.choice((len(data), self._chance.randrange(len(data))))])
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))
        finally:
            line.close(reset=True)

    async def odd_http(self) -> None:
        path, body = valid_body(self._chance)
        await self._exchange(self._chance.choice(_ODD)(self, path, body))

    async def huge_header(self) -> None:
        kind = self._chance.randrange(3)
        if kind == 0:
            await self._exchange(b"GET /" + b"a" * _MB + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        elif kind == 1:
            await self._exchange(self._request("/v1/models", b"", more="X: " + "a" * _MB + "\r\n"))
        else:
            await self._exchange(self._request("/v1/models", b"", more="".join(f"X{i}: y\r\n" for i in range(20_000))))

    async def pipelined(self) -> None:
        one = self._request("/tokenize", b'{"content": "Hello"}')
        await self._exchange(one * 100 + self._request("/tokenize", b"{}", more="Connection: close\r\n"))

    async def slow_header(self) -> None:
        with self._closing(await self._connect()) as line:
            for byte in self._request("/v1/models", b"", more="X: y\r\n" * 100):
                await line.send(bytes([byte]))
                await asyncio.sleep(0.5)

    async def slow_body(self) -> None:
        path, body = valid_body(self._chance)
        data = self._request(path, body)
        with self._closing(await self._connect()) as line:
            await line.send(data[: -len(body)])
            for byte in body:
                await line.send(bytes([byte]))
                await asyncio.sleep(1.0)

    async def slow_reader(self) -> None:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}
        with self._closing(await self._connect(receive_bytes=2048)) as line:
            await line.send(self._request("/v1/completions", json.dumps(body).encode()))
            while await line.reader.read(1):
                await asyncio.sleep(1.0)

    async def large_declared(self) -> None:
        head = self._request("/v1/completions", b"", length=f"Content-Length: {100 * _MB}\r\n")
        await self._exchange(head, *[b" " * _MB] * 100)

    async def large_chunked(self) -> None:
        head = self._request("/v1/completions", b"", length="Transfer-Encoding: chunked\r\n")
        await self._exchange(head, *[b"100000\r\n" + b" " * _MB + b"\r\n"] * 100)

    async def stalled_large_body(self) -> None:
        """Send most of the largest body that is allowed, and then nothing."""
        head = self._request("/v1/completions", b"", length=f"Content-Length: {16 * _MB}\r\n")
        await self._exchange(head, *[b" " * _MB] * 15)

    async def burst(self) -> None:
        """Open more connections than the server allows."""
        if self._bursting.locked():  # two bursts would need more files than a process may open
            return
        lines: list[Line] = []
        await self._bursting.acquire()
        try:
            while len(lines) < _BURST:
                lines.append(await self._connect())
            await asyncio.sleep(1.0)
        finally:
            self._bursting.release()
            for line in lines:
                line.close(reset=True)


async def _send_all(line: Line, parts: Sequence[bytes]) -> None:
    with suppress(OSError):  # the server may close the connection at any time
        for part in parts:
            await line.send(part)


_ODD: Final[tuple[Callable[[Any, str, bytes], bytes], ...]] = (
    lambda self, path, body: b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    lambda self, path, body: b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n",
    lambda self, path, body: b"TRACE / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    lambda self, path, body: b"GET / HTTP/0.9\r\n\r\n",
    lambda self, path, body: b"GET /v1/models HTTP/1.0\r\n\r\n",
    lambda self, path, body: b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    lambda self, path, body: b"GET /../../etc/passwd%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    lambda self, path, body: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    lambda self, path, body: b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
    lambda self, path, body: self._request(path, body, more="Transfer-Encoding: chunked\r\nConnection: close\r\n"),
    lambda self, path, body: self._request(path, body, length="Content-Length: -1\r\n", more="Connection: close\r\n"),
    lambda self, path, body: self._request(path, body, length="Content-Length: 5\r\nContent-Length: 6\r\n"),
    lambda self, path, body: self._request(path, body, more="Expect: 100-continue\r\nConnection: close\r\n"),
    lambda self, path, body: self._request(path, body, more="Content-Encoding: gzip\r\nConnection: close\r\n"),
    lambda self, path, body: self._request(path, body, more="Connection: Upgrade, close\r\nUpgrade: websocket\r\n"),
    lambda self, path, body: self._request(path, body, more="Origin: http://evil.example\r\nConnection: close\r\n"),
    lambda self, path, body: self._request(path, body, more="Cookie: \xff\xfe\r\nConnection: close\r\n"),
    lambda self, path, body: self._request(
        path, b"ffffffffffffffff\r\n" + body, length="Transfer-Encoding: chunked\r\n", more="Connection: close\r\n"
    ),
    lambda self, path, body: self._request("/detokenize", b'{"tokens": [1e9, -1, "a"]}', more="Connection: close\r\n"),
    lambda self, path, body: self._request("/tokenize", b'{"content": 5}', more="Connection: close\r\n"),
)


def main() -> None:
    port, key, seed, seconds, idle = sys.argv[1:]
    _allow_open_files()
    found = asyncio.run(Attacks(int(port), key, int(seed)).run(float(seconds), int(idle)))
    print(json.dumps([found.attacks, found.statuses, found.unexpected]))  # noqa: T201


def _allow_open_files() -> None:
    if sys.platform == "win32":
        raise NotImplementedError("needs resource limits")
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_OPEN_FILES, hard), hard))


if __name__ == "__main__":
    main()
