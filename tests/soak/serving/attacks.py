"""Hostile clients in a process of their own: `python -m tests.soak.serving.attacks PORT KEY SEED SECONDS IDLE`.

It prints one line of JSON: how often each attack ran, the statuses of the responses, and responses that must not occur.
tests/serving has more attacks, one at a time; these are the ones that cost a server the most.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.soak.serving.clients import CHAT, COMPLETION, random_requests
from tests.support.constraint import hostile_grammars as grammars

_QUICK_WORKERS = 12
_SLOW_WORKERS = 20
_BURST = 1200  # connections, more than the server allows
_MB = 1 << 20
_PATIENCE_S = 20.0  # each attack ends after this time
_PAUSE_S = 0.05  # after an attack that failed
_OPEN_FILES = 4096
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
# What a server may answer to a hostile client. Above all, 500 is missing.
_EXPECTED = frozenset((100, 200, 204, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 501, 503))

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
            "hostile body": (30, lambda: self._exchange(self._request(*hostile_body(self._chance)))),
            "reset": (15, self._reset),
            "mutated request": (15, self._mutated_request),
            "random bytes": (5, lambda: self._exchange(self._chance.randbytes(100_000) + b"\r\n\r\n")),
            "100 MB in chunks": (4, lambda: self._large("Transfer-Encoding: chunked", _CHUNK, 100)),
        }
        self._slow: Kinds = {
            "slow body": (4, self._slow_body),
            "slow reader": (6, self._slow_reader),
            # Most of the largest body that is allowed, and then nothing.
            "stalled large body": (10, lambda: self._large(f"Content-Length: {16 * _MB}", b" " * _MB, 15)),
            "connections in a burst": (1, self._burst),
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
            _abort(lines)

    async def _connect(self, receive_bytes: int = 65536) -> Streams:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
            return await asyncio.open_connection(sock=connection, limit=receive_bytes)
        except BaseException:
            connection.close()
            raise

    @asynccontextmanager
    async def _connected(self, receive_bytes: int = 65536) -> AsyncIterator[Streams]:
        reader, writer = await self._connect(receive_bytes)
        try:
            yield reader, writer
        finally:
            _abort([(reader, writer)]) if self._chance.random() < 0.5 else writer.close()

    def _request(self, path: str, body: bytes, length: str | None = None) -> bytes:
        """Return a POST request. `length` replaces the header with the length."""
        lines = (
            *(f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"),
            *(f"Authorization: Bearer {self._key}", length or f"Content-Length: {len(body)}", "\r\n"),
        )
        return "\r\n".join(lines).encode() + body

    async def _exchange(self, data: bytes, *more: bytes) -> None:
        """Send some data, read up to 4 MB while sending it, and check the statuses of the responses."""
        answer = bytearray()
        async with self._connected() as (reader, writer):
            sending = asyncio.create_task(_send_all(writer, (data, *more)))
            try:
                while (part := await reader.read(65536)) and len(answer) < 4 * _MB:
                    answer += part
            finally:
                sending.cancel()
                await asyncio.wait({sending})
        for status in map(int, _STATUS.findall(answer)):
            self.statuses[status] += 1
            if status not in _EXPECTED:
                self.unexpected.append(f"{answer[:300]!r} for {data[:3000]!r}")

    async def _mutated_request(self) -> None:
        await self._exchange(mutated_bytes(self._chance, self._request(*valid_body(self._chance))))

    async def _large(self, length: str, part: bytes, count: int) -> None:
        await self._exchange(self._request("/v1/completions", b"", length), *[part] * count)

    async def _reset(self) -> None:
        """Leave at a random moment: in the body, in the queue, in the prompt or in the answer."""
        data = self._request(*valid_body(self._chance))
        line = await self._connect()
        try:
            await _send_all(line[1], (data[: self._chance.choice((len(data), self._chance.randrange(len(data))))],))
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))
        finally:
            _abort([line])

    async def _slow_body(self) -> None:
        """Send a body byte by byte."""
        path, body = valid_body(self._chance)
        async with self._connected() as (_, writer):
            writer.write(self._request(path, body)[: -len(body)])
            for byte in body:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1.0)

    async def _slow_reader(self) -> None:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}
        async with self._connected(receive_bytes=2048) as (reader, writer):
            writer.write(self._request("/v1/completions", json.dumps(body).encode()))
            while await reader.read(1):
                await asyncio.sleep(1.0)

    async def _burst(self) -> None:
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
                _abort(lines)


_CHUNK = b"100000\r\n" + b" " * _MB + b"\r\n"


async def _send_all(writer: asyncio.StreamWriter, parts: Sequence[bytes]) -> None:
    with suppress(OSError):  # the server may close the connection at any time
        for part in parts:
            writer.write(part)
            await writer.drain()


def _abort(lines: Sequence[Streams]) -> None:
    """Close connections with a reset."""
    for _, writer in lines:
        with suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()


# --- bodies

_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TEMPLATE = "{{ cycler.__init__.__globals__ }} {% for i in range(10**9) %}x{% endfor %}"
_DEEP = json.loads('{"type": "object", "properties": {"a": ' * 90 + "{}" + "}}" * 90)


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}


def _messages(*contents: Any) -> dict[str, Any]:
    return _chat(messages=[{"role": "user", "content": content} for content in contents])


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


# Many of these bodies are valid, but large or absurd.
_CHATS: Sequence[Callable[[], dict[str, Any]]] = (
    lambda: _messages(*["Hi"] * 10_000),
    lambda: _messages("a" * 1_000_000),
    lambda: _messages("\u0000\u200b\ufdd0\U0001f9d1\u200d" * 10_000),
    lambda: _messages([{"type": "text", "text": "a"}] * 100_000),
    lambda: _messages(_TEMPLATE),
    lambda: _chat(messages=[{"role": "assistant", "tool_calls": [_CALL] * 10_000}]),
    lambda: _chat(tools=[_tool(_DEEP)]),
    lambda: _chat(tools=[_tool(json.loads(grammars.SCHEMAS["doubling allOf"]))]),
    lambda: _chat(max_tokens=2**31 - 1, ignore_eos=True),
    lambda: _chat(logit_bias={str(i): 1 for i in range(100_000)}),
    lambda: _chat(stop="a" * 1_000_000),
    lambda: _chat(temperature=10**400, top_k=10**30, seed=10**40),
    lambda: _chat(**{f"field{i}\r\nx: y": i for i in range(10_000)}),
    lambda: _chat(chat_template_kwargs={"messages": [], "range": 5, "a" * 10_000: _DEEP}),
    lambda: _chat(logprobs=True, top_logprobs=20, max_tokens=50, n=4),
)
_PROMPTS: Sequence[Any] = ("word " * 200_000, [5] * 100_000, ["a"] * 10_000)
_NOT_JSON: Sequence[Callable[[], bytes]] = (
    lambda: b'{"seed": ' + b"9" * 1_000_000 + b"}",
    lambda: b'{"a": [' + b"[]," * 4_000_000 + b"[]]}",
    lambda: b'{"messages": [{"role": "user", "content": "' + b"a" * 15_000_000 + b'"}]}',
)
_FORMATS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("json_schema", {**grammars.SCHEMAS, **grammars.HARMLESS_SCHEMAS}),
    ("guided_grammar", {**grammars.GRAMMARS, **grammars.HARMLESS_GRAMMARS}),
    ("grammar", grammars.GBNF_GRAMMARS),
    ("guided_regex", {**grammars.REGEXES, **grammars.HARMLESS_REGEXES}),
    ("guided_choice", grammars.CHOICES),
)


def hostile_body(chance: random.Random) -> tuple[str, bytes]:
    """Return a path and a body."""
    [kind] = chance.choices(("chat", "completion", "not JSON", "format", "mutated"), (40, 10, 10, 20, 20))
    match kind:
        case "chat":
            return CHAT, json.dumps(chance.choice(_CHATS)()).encode()
        case "completion":
            return COMPLETION, json.dumps({"prompt": chance.choice(_PROMPTS)}).encode()
        case "not JSON":
            return CHAT, chance.choice(_NOT_JSON)()
        case "format":
            field, values = chance.choice(_FORMATS)
            return CHAT, json.dumps(_chat(**{field: chance.choice([*values.values()])})).encode()
    path, body = valid_body(chance)
    return path, mutated_bytes(chance, body)


def valid_body(chance: random.Random) -> tuple[str, bytes]:
    """Return the path and the body of a request that is valid."""
    [asked] = random_requests(chance.randrange(1 << 30), 1, with_tools=False)
    return asked.path, json.dumps(asked.body).encode()


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """Replace up to five short parts, at random places, by nothing, by themselves twice, or by something odd."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(changed) + 1)
        part = changed[at : at + chance.randint(1, 20)]
        odd = (b"", part + part, chance.randbytes(1), b'"', b"{", b"[", b"\x00", b"\xf0\x9f", b"1e9", b"null", b",")
        changed[at : at + len(part)] = chance.choice(odd)
    return bytes(changed)


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
