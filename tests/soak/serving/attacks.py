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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
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
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Attacks:
    """All attacks against one server, without any help from an HTTP library."""

    def __init__(self, port: int, key: str, seed: int) -> None:
        self._port, self._key = port, key
        self._chance = random.Random(seed)
        self._bursting = asyncio.Lock()
        self.attacks, self.statuses = Counter[str](), Counter[int]()
        self.unexpected: list[str] = []
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

    async def run(self, seconds: float, idle: int) -> None:
        """Attack for some seconds, and hold `idle` connections open that send nothing."""
        deadline = time.monotonic() + seconds
        kinds = [self._quick] * _QUICK_WORKERS + [self._slow] * _SLOW_WORKERS
        holding = asyncio.create_task(self._hold(idle))
        await asyncio.gather(*(self._attack_on(deadline, each) for each in kinds))
        holding.cancel()
        await asyncio.wait({holding})

    async def _attack_on(self, deadline: float, kinds: Kinds) -> None:
        weights = [weight for weight, _ in kinds.values()]
        while time.monotonic() < deadline:
            [name] = self._chance.choices([*kinds], weights)
            self.attacks[name] += 1
            try:
                async with asyncio.timeout(min(_PATIENCE_S, max(1.0, deadline - time.monotonic()))):
                    await kinds[name][1]()
            except OSError as error:  # also TimeoutError
                self.attacks[f"ended by {errno.errorcode.get(error.errno or 0, type(error).__name__)}"] += 1
                await asyncio.sleep(_PAUSE_S)

    async def _hold(self, idle: int) -> None:
        """Keep connections open, and open new ones for those that the server closes."""
        lines: list[Streams] = []
        try:
            while True:
                lines = [line for line in lines if not line[0].at_eof() and not line[1].is_closing()]
                for _ in range(min(100, idle - len(lines))):
                    lines.append(await self._connect())
                await asyncio.sleep(0.1)
        finally:
            for _, writer in lines:
                _reset(writer)

    async def _connect(self, receive_bytes: int = 0) -> Streams:
        connection = socket.socket()
        connection.setblocking(False)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
            return await asyncio.open_connection(sock=connection, limit=receive_bytes or 65536)
        except BaseException:
            connection.close()
            raise

    @asynccontextmanager
    async def _connected(self, receive_bytes: int = 0) -> AsyncIterator[Streams]:
        reader, writer = await self._connect(receive_bytes)
        try:
            yield reader, writer
        finally:
            _reset(writer) if self._chance.random() < 0.5 else writer.close()

    def _request(self, path: str, body: bytes, *, more: str = "", length: str | None = None) -> bytes:
        """Return a POST request. `more` has more headers, and `length` replaces the one with the length."""
        length = f"Content-Length: {len(body)}\r\n" if length is None else length
        return (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._key}\r\n{length}{more}\r\n"
        ).encode("latin-1") + body

    async def _exchange(self, data: bytes, *more: bytes) -> None:
        """Send some data, read up to 4 MB while sending it, and check the statuses of the responses."""
        async with self._connected() as (reader, writer):
            sending = asyncio.create_task(_send_all(writer, (data, *more)))
            answer = bytearray()
            try:
                while (part := await reader.read(65536)) and len(answer) < 4 * _MB:
                    answer += part
            finally:
                sending.cancel()
                await asyncio.wait({sending})
        for found in _STATUS.finditer(answer):
            status = int(found[1])
            self.statuses[status] += 1
            if status not in _EXPECTED:
                self.unexpected.append(f"{answer[:300]!r} for {data[:3000]!r}")

    async def hostile_body(self) -> None:
        await self._exchange(self._request(*hostile_body(self._chance), more=_CLOSE))

    async def mutated_request(self) -> None:
        await self._exchange(mutated_bytes(self._chance, self._request(*valid_body(self._chance), more=_CLOSE)))

    async def random_bytes(self) -> None:
        await self._exchange(self._chance.randbytes(self._chance.randint(1, 100_000)) + b"\r\n\r\n")

    async def reset(self) -> None:
        """Leave at a random moment: in the body, in the queue, in the prompt or in the answer."""
        data = self._request(*valid_body(self._chance))
        _, writer = await self._connect()
        try:
            writer.write(data[: self._chance.choice((len(data), self._chance.randrange(len(data))))])
            await writer.drain()
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))
        finally:
            _reset(writer)

    async def odd_http(self) -> None:
        path, body = valid_body(self._chance)
        odd = self._chance.choice(_ODD)
        if isinstance(odd, str):
            await self._exchange(f"{odd}\r\n{_CLOSE}\r\n".encode())
        else:
            fields = {"path": path, "body": body, "more": "", **odd}
            await self._exchange(self._request(**{**fields, "more": fields["more"] + _CLOSE}))

    async def huge_header(self) -> None:
        data = self._chance.choice(
            (
                b"GET /" + b"a" * _MB + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
                self._request("/v1/models", b"", more="X: " + "a" * _MB + "\r\n"),
                self._request("/v1/models", b"", more="".join(f"X{i}: y\r\n" for i in range(20_000))),
            )
        )
        await self._exchange(data)

    async def pipelined(self) -> None:
        one = self._request("/tokenize", b'{"content": "Hello"}')
        await self._exchange(one * 100 + self._request("/tokenize", b"{}", more=_CLOSE))

    async def slow_header(self) -> None:
        await self._drip(b"", self._request("/v1/models", b"", more="X: y\r\n" * 100), pause_s=0.5)

    async def slow_body(self) -> None:
        path, body = valid_body(self._chance)
        await self._drip(self._request(path, body)[: -len(body)], body, pause_s=1.0)

    async def _drip(self, first: bytes, data: bytes, pause_s: float) -> None:
        """Send some data, and then more of it byte by byte."""
        async with self._connected() as (_, writer):
            writer.write(first)
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(pause_s)

    async def slow_reader(self) -> None:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}
        async with self._connected(receive_bytes=2048) as (reader, writer):
            writer.write(self._request("/v1/completions", json.dumps(body).encode()))
            while await reader.read(1):
                await asyncio.sleep(1.0)

    async def large_declared(self) -> None:
        await self._large(f"Content-Length: {100 * _MB}\r\n", b" " * _MB, 100)

    async def large_chunked(self) -> None:
        await self._large("Transfer-Encoding: chunked\r\n", b"100000\r\n" + b" " * _MB + b"\r\n", 100)

    async def stalled_large_body(self) -> None:
        """Send most of the largest body that is allowed, and then nothing."""
        await self._large(f"Content-Length: {16 * _MB}\r\n", b" " * _MB, 15)

    async def _large(self, length: str, part: bytes, count: int) -> None:
        await self._exchange(self._request("/v1/completions", b"", length=length), *[part] * count)

    async def burst(self) -> None:
        """Open more connections than the server allows."""
        if self._bursting.locked():  # two bursts would need more files than a process may open
            return
        lines: list[Streams] = []
        async with self._bursting:
            try:
                while len(lines) < _BURST:
                    lines.append(await self._connect())
                await asyncio.sleep(1.0)
            finally:
                for _, writer in lines:
                    _reset(writer)


async def _send_all(writer: asyncio.StreamWriter, parts: tuple[bytes, ...]) -> None:
    with suppress(OSError):  # the server may close the connection at any time
        for part in parts:
            writer.write(part)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


_CLOSE: Final = "Connection: close\r\n"
_ODD: Final[tuple[str | dict[str, Any], ...]] = (  # heads, and arguments of `Attacks._request`
    "OPTIONS * HTTP/1.1\r\nHost: localhost",
    "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com",
    "TRACE / HTTP/1.1\r\nHost: localhost",
    "GET / HTTP/0.9",
    "GET /v1/models HTTP/1.0",
    "GET http://evil.example/ HTTP/1.1\r\nHost: evil.example",
    "GET /../../etc/passwd%00 HTTP/1.1\r\nHost: localhost",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n",
    "GET / HTTP/1.1\r\nHost: a\r\nHost: b",
    {"more": "Transfer-Encoding: chunked\r\n"},
    {"length": "Content-Length: -1\r\n"},
    {"length": "Content-Length: 5\r\nContent-Length: 6\r\n"},
    {"more": "Expect: 100-continue\r\n"},
    {"more": "Content-Encoding: gzip\r\n"},
    {"more": "Upgrade: websocket\r\nConnection: Upgrade\r\n"},
    {"more": "Origin: http://evil.example\r\n"},
    {"more": "Cookie: \xff\xfe\r\n"},
    {"body": b"ffffffffffffffff\r\n{}", "length": "Transfer-Encoding: chunked\r\n"},
    {"path": "/detokenize", "body": b'{"tokens": [1e9, -1, "a"]}'},
    {"path": "/tokenize", "body": b'{"content": 5}'},
)


def main() -> None:
    port, key, seed, seconds, idle = sys.argv[1:]
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_OPEN_FILES, hard), hard))
    attacks = Attacks(int(port), key, int(seed))
    asyncio.run(attacks.run(float(seconds), int(idle)))
    print(json.dumps([attacks.attacks, attacks.statuses, attacks.unexpected]))  # noqa: T201


if __name__ == "__main__":
    main()
