"""Hostile clients in a process of their own: `python -m tests.soak.serving.attacks PORT KEY SEED SECONDS`.

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

from tests.soak.serving.clients import COMPLETION, random_requests
from tests.support.batching.batch_runs import CHAT
from tests.support.constraint import hostile_grammars as grammars

_QUICK_WORKERS = 12
_SLOW_WORKERS = 20
_MB = 1 << 20
_PATIENCE_S = 20.0  # each attack ends after this time
_PAUSE_S = 0.05  # after an attack that failed
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
        }

    async def run(self, seconds: float) -> None:
        """Attack for some seconds."""
        deadline = time.monotonic() + seconds
        kinds = [self._quick] * _QUICK_WORKERS + [self._slow] * _SLOW_WORKERS
        await asyncio.gather(*(self._attack_on(deadline, each) for each in kinds))

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

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Streams]:
        """Connect, and leave with a reset or as a program that ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        connection = writer.get_extra_info("socket")
        try:
            yield reader, writer
        finally:
            if self._chance.random() < 0.5:
                with suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

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
        async with self._connected() as (_, writer):
            writer.write(data[: self._chance.choice((len(data), self._chance.randrange(len(data))))])
            await writer.drain()
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))

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
        async with self._connected() as (reader, writer):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            writer.write(self._request("/v1/completions", json.dumps(body).encode()))
            while await reader.read(1):
                await asyncio.sleep(1.0)


_CHUNK = b"100000\r\n" + b" " * _MB + b"\r\n"


async def _send_all(writer: asyncio.StreamWriter, parts: Sequence[bytes]) -> None:
    with suppress(OSError):  # the server may close the connection at any time
        for part in parts:
            writer.write(part)
            await writer.drain()


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
    [asked] = random_requests(chance.randrange(1 << 30), 1)
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
    port, key, seed, seconds = sys.argv[1:]
    attacks = Attacks(int(port), key, int(seed))
    asyncio.run(attacks.run(float(seconds)))
    print(json.dumps([attacks.attacks, attacks.statuses, attacks.unexpected]))  # noqa: T201


if __name__ == "__main__":
    main()
