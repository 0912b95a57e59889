"""A server under attack, beside well-behaved clients: it must neither end, leak nor answer anyone else differently."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tests.soak.driver import Broken, Case, Soak
from tests.soak.serving.clients import Clients, context_size, model_arguments, random_requests, settled_metrics
from tests.support.cli.commands import ROOT
from tests.support.serving.served import Resources, Served, serve

_ATTACK_S = (5.0, 20.0, 120.0)  # the lengths of the first attacks; the last one is that of all others
_KEYS = ("key-of-the-good-clients", "key-of-the-hostile-ones")
_CLIENTS = 2
_SETTLE_S = 150.0  # the server gives slow clients a minute for a body, and another one to read
_TRIMMED_S = 3.0  # after so many idle seconds, both processes have returned their freed memory
_MOST_FILES = 4  # more than at the beginning
_MOST_GROWTH = (1.1, 16 << 20)  # of the memory, as a factor and bytes, from the middle of the soak to its end
_LEAST_ROUNDS = 6  # until growth can be told from memory that the allocators keep for later
_MOST_WAIT_S = 0.15
_IRREGULAR = {"n", "response_format", "guided_regex"}  # fields of requests whose gaps vary


def hostile(soak: Soak) -> Iterator[Case]:
    """Attack for some seconds per case, and check the server and the good clients after each attack."""
    context = 4 * context_size(soak)
    keys = soak.folder / "keys.txt"
    keys.write_text("\n".join(_KEYS))
    keys.chmod(0o600)
    sizes = ["--parallel", "8", "--ctx-size", str(context), "--kv-tokens", str(4 * context)]
    arguments = [*model_arguments(soak, 0.005), *sizes, "--api-key-file", str(keys), "--open-metrics"]
    asked = [one for one in random_requests(soak.seed, 24) if not _IRREGULAR & {*one.body}]
    with serve(*arguments, log=soak.folder / "siege.log") as server:
        clients = Clients(asked, _KEYS[0])
        asyncio.run(clients.learn(server.port))
        quiet, gaps_s = [_settled(server)], list[float]()

        def case(number: int) -> str:
            seconds = _ATTACK_S[min(len(quiet), len(_ATTACK_S)) - 1]
            words = (server.port, _KEYS[1], soak.seed_of(number), seconds)
            command = [sys.executable, "-m", "tests.soak.serving.attacks", *map(str, words)]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
                gaps_s.extend(_ask_for(clients, server.port, seconds))
                output, _ = process.communicate(timeout=seconds + _SETTLE_S)
            attacks, statuses, unexpected = json.loads(output)
            soak.counts.update(attacks)
            soak.counts.update({f"status {status}": count for status, count in statuses.items()})
            if unexpected:
                raise Broken(f"unexpected responses: {unexpected[0]}")
            quiet.append(_settled(server))
            _check(server, quiet)
            return "rounds"

        yield case
    limit = max(_MOST_WAIT_S, 3 * _percentile(gaps_s, 0.5))
    if len(quiet) > len(_ATTACK_S) and (p99 := _percentile(gaps_s, 0.99)) > limit:  # short attacks tell little
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
    """Check for crashes, tracebacks, and resources that grew since the beginning, or for memory, since the middle."""
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


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed, or 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
