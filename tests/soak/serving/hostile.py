"""A server under attack, beside well-behaved clients: it must neither end, leak nor answer anyone else differently.

The tests in tests/serving run more kinds of attacks, one at a time; these are the ones that cost a server the most.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tests.soak.driver import Broken, Case, Soak
from tests.soak.serving.clients import COMPLETION, Clients, context_size, random_requests, settled_metrics
from tests.support.batching.batch_runs import CHAT
from tests.support.constraint import hostile_grammars as grammars
from tests.support.serving.served import Resources, Served, serve

_ATTACK_S = (5.0, 20.0, 120.0)  # lengths of the first three attacks; all others are as long as the third
_KEYS = ("key-of-the-good-clients", "key-of-the-hostile-ones")
_CLIENTS = 2
_SETTLE_S = 150.0  # the server gives slow clients a minute to send a body, and another minute to read
_TRIMMED_S = 3.0  # time in which idle processes return their freed memory
_MOST_FILES = 4  # more than at the beginning
_MOST_GROWTH = (1.1, 16 << 20)  # of the memory, as a factor and bytes, from the middle of the soak to its end
_LEAST_ROUNDS = 6  # in the first rounds, memory also grows because allocators keep what was freed
_MOST_WAIT_S = 0.15
_IRREGULAR = {"n", "response_format", "guided_regex"}  # fields of requests whose gaps vary


def hostile(soak: Soak) -> Iterator[Case]:
    """Attack for some seconds per case, and check the server and the good clients after each attack."""
    context = 4 * context_size(soak)
    keys = soak.folder / "keys.txt"
    keys.write_text("\n".join(_KEYS))
    keys.chmod(0o600)
    sizes = ["--parallel", "8", "--ctx-size", str(context), "--kv-tokens", str(4 * context)]
    arguments = [*soak.model_arguments(0.005), *sizes, "--api-key-file", str(keys), "--open-metrics"]
    asked = [one for one in random_requests(soak.seed, 24) if not _IRREGULAR & {*one.body}]
    with serve(*arguments, log=soak.folder / "siege.log") as server:
        clients = Clients(asked, _KEYS[0])
        asyncio.run(clients.learn(server.port))
        quiet, gaps_s = [_settled(server)], list[float]()

        def case(number: int) -> str:
            seconds = _ATTACK_S[min(len(quiet), len(_ATTACK_S)) - 1]
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                attacking = process.submit(attack_for, server.port, _KEYS[1], soak.seed_of(number), seconds)
                gaps_s.extend(_ask_for(clients, server.port, seconds))
                attacks, statuses, unexpected = attacking.result(timeout=_SETTLE_S)
            soak.counts.update(attacks)
            soak.counts.update({f"status {status}": count for status, count in statuses.items()})
            if unexpected:
                raise Broken(f"unexpected responses: {unexpected[0]}")
            quiet.append(_settled(server))
            _check(server, quiet)
            return "rounds"

        yield case
    if len(quiet) > len(_ATTACK_S):  # short attacks tell little
        median, p99 = np.quantile(gaps_s, (0.5, 0.99))
        if p99 > (limit := max(_MOST_WAIT_S, 3 * median)):
            raise Broken(f"the p99 between tokens of the good clients is {p99:.3f} s, and must be below {limit:.3f} s")


def _settled(server: Served) -> Resources:
    """Wait until the server has no connections and no requests, and measure it."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        resources, metrics = server.resources(), server.metrics()
        busy = metrics["open_requests"] - 1 + metrics["requests_running"] + metrics["requests_waiting"]
        if (not busy and not resources.connections) or time.monotonic() > deadline:
            time.sleep(_TRIMMED_S)
            return server.resources()
        time.sleep(0.2)


def _check(server: Served, quiet: Sequence[Resources]) -> None:
    """Check for crashes and tracebacks, and that the server's files, processes and memory have not grown."""
    if server.has_ended or settled_metrics(server)["engine_restarts_total"]:
        raise Broken("the server or its engine has crashed")
    if b"Traceback" in server.log.read_bytes():
        raise Broken(f"a traceback in {server.log}")
    first, last = quiet[0], quiet[-1]
    warm = quiet[len(quiet) // 3 : 2 * len(quiet) // 3] if len(quiet) > _LEAST_ROUNDS else []
    for name in ("files", "front_files", "helpers"):
        if getattr(last, name) > getattr(first, name) + _MOST_FILES:
            raise Broken(f"{name}: {getattr(first, name)} -> {getattr(last, name)}")
    if last.connections:
        raise Broken(f"{last.connections} connections are left")
    factor, more = _MOST_GROWTH
    for name in ("memory", "front_memory"):
        before, after = max((getattr(one, name) for one in warm), default=0), getattr(last, name)
        if before and after > factor * before + more:
            raise Broken(f"{name}: {before:,} -> {after:,} bytes")


def _ask_for(clients: Clients, port: int, seconds: float) -> list[float]:
    """Let good clients ask for some seconds. Returns the times between the pieces of their answers in seconds."""

    async def ask() -> list[float]:
        stop, gaps_s = time.monotonic() + seconds, list[float]()
        while time.monotonic() < stop:
            for exchange in await clients.ask_all(port, range(len(clients.asked)), _CLIENTS):
                moments = [moment for moment, _ in exchange.pieces]
                gaps_s += [later - earlier for earlier, later in pairwise(moments)]
        return gaps_s

    return asyncio.run(ask())


# --- attacks

_WORKERS = 32
_MB = 1 << 20
_MOST_READ = 4 * _MB
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
# The statuses that hostile clients may get. Status 500 is a finding.
_EXPECTED = frozenset((100, 200, 204, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 501, 503))


@dataclass
class Attack:
    """A hostile request: its parts, the pauses between them and between reads of 64 KB, and when the client leaves."""

    parts: Sequence[bytes]
    send_pause_s: float = 0.0
    read_pause_s: float = 0.0
    patience_s: float = 20.0

    async def run(self, port: int, *, reset: bool) -> bytes:
        """Send the request and read the responses. The client leaves with a reset, or as a program that ends."""
        answer = bytearray()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = writer.get_extra_info("socket")
        if self.read_pause_s:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sending = asyncio.create_task(self._send(writer))
        try:
            async with asyncio.timeout(self.patience_s):
                while (part := await reader.read(65536)) and len(answer) < _MOST_READ:
                    answer += part
                    await asyncio.sleep(self.read_pause_s)
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            if reset:
                with suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return bytes(answer)

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the server may close the connection at any time
            for part in self.parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(self.send_pause_s)


def random_attack(chance: random.Random, key: str) -> tuple[str, Attack]:
    """Return an attack and its name."""

    def request(path: str, body: bytes, length: str | None = None) -> bytes:
        length = length or f"Content-Length: {len(body)}"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        return f"{head}Content-Type: application/json\r\n{length}\r\n\r\n".encode() + body

    [name] = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()])
    path, body = valid_body(chance)
    data = request(path, body)
    match name:
        case "hostile body":
            return name, Attack([request(*hostile_body(chance))])
        case "mutated request":
            return name, Attack([mutated_bytes(chance, data)])
        case "leave":  # in the body, in the queue, in the prompt or in the answer
            part = data[: chance.choice((len(data), chance.randrange(len(data))))]
            return name, Attack([part], patience_s=chance.uniform(0.0, 1.0))
        case "100 MB in chunks":
            head = request(COMPLETION, b"", "Transfer-Encoding: chunked")
            return name, Attack([head, *[b"100000\r\n" + b" " * _MB + b"\r\n"] * 100])
        case "stalled large body":  # most of the largest body that is allowed, and then nothing
            return name, Attack([request(COMPLETION, b"", f"Content-Length: {16 * _MB}"), *[b" " * _MB] * 15])
        case "slow body":
            return name, Attack([data[: -len(body)], *(bytes([byte]) for byte in body)], send_pause_s=1.0)
        case "slow reader":
            endless = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}
            return name, Attack([request(COMPLETION, json.dumps(endless).encode())], read_pause_s=1.0)
    return name, Attack([chance.randbytes(100_000) + b"\r\n\r\n"])


_WEIGHTS = {
    "hostile body": 30,
    "leave": 15,
    "mutated request": 15,
    "random bytes": 5,
    "100 MB in chunks": 4,
    "slow body": 4,
    "slow reader": 6,
    "stalled large body": 10,
}


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
    """Delete, double or replace up to five short parts at random places."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(changed) + 1)
        part = changed[at : at + chance.randint(1, 20)]
        odd = (b"", part + part, chance.randbytes(1), b'"', b"{", b"[", b"\x00", b"\xf0\x9f", b"1e9", b"null", b",")
        changed[at : at + len(part)] = chance.choice(odd)
    return bytes(changed)


def attack_for(port: int, key: str, seed: int, seconds: float) -> tuple[Counter[str], Counter[int], list[str]]:
    """Attack for some seconds. Returns the counts of attacks and statuses, and the unexpected responses."""
    chance, attacks, statuses, unexpected = random.Random(seed), Counter[str](), Counter[int](), list[str]()
    deadline = time.monotonic() + seconds

    async def attack_on() -> None:
        while time.monotonic() < deadline:
            name, attack = random_attack(chance, key)
            attack.patience_s = min(attack.patience_s, max(1.0, deadline - time.monotonic()))
            attacks[name] += 1
            try:
                answer = await attack.run(port, reset=chance.random() < 0.5)
            except OSError as error:  # also TimeoutError
                attacks[f"ended by {type(error).__name__}"] += 1
                continue
            for status in map(int, _STATUS.findall(answer)):
                statuses[status] += 1
                if status not in _EXPECTED:
                    unexpected.append(f"{answer[:300]!r} for {attack.parts[0][:3000]!r}")

    async def attack_at_once() -> None:
        await asyncio.gather(*(attack_on() for _ in range(_WORKERS)))

    asyncio.run(attack_at_once())
    return attacks, statuses, unexpected
