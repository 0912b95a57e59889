"""A server under attack, beside well-behaved clients: it must neither end, leak nor answer anyone else differently."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.soak.serving.good_client import Experience, GoodClients, percentile
from tests.soak.serving.requests import random_requests
from tests.soak.serving.same import settled_metrics
from tests.support.cli.commands import ROOT
from tests.support.serving.served import Resources, Served, serve

IDLE: Final = 960  # connections that send nothing; with the attacks', they stay below the server's limit of 1,024
_KEYS: Final = ("key-of-the-good-clients", "key-of-the-hostile-ones")
_SETTLE_S: Final = 150.0  # the server gives slow clients a minute for a body, and another one to read
_TRIMMED_S: Final = 3.0  # after so many idle seconds, both processes have returned their freed memory
_MOST_FILES: Final = 4  # more than at the beginning
_MOST_GROWTH: Final = (1.1, 16 << 20)  # of the memory, as a factor and bytes, from the middle of the soak to its end
_LEAST_ROUNDS: Final = 6  # until growth can be told from memory that the allocators keep for later
_MOST_WAIT_S: Final = 0.15
_FEATURES: Final = ("choices", "format")  # which the good clients leave out, because their gaps are irregular


@dataclass
class Besieged:
    """The outcome of a run.

    quiet      the resources at the beginning, and after each round
    alone      what the good clients saw between the attacks
    beside     and beside them
    crashes    restarts of the engine, and 1 if the server itself has ended
    leaks      in words
    """

    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    quiet: list[Resources] = field(default_factory=list)
    alone: Experience = field(default_factory=Experience)
    beside: Experience = field(default_factory=Experience)
    crashes: int = 0
    traces: int = 0
    leaks: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        harmed = self.alone.harmed + self.beside.harmed
        return not (self.crashes or self.traces or self.unexpected or self.leaks or harmed) and self.is_responsive

    @property
    def is_responsive(self) -> bool:
        """Whether the good clients' tokens came steadily: p99 <= 3 x p50, or 150 ms."""
        limit = max(_MOST_WAIT_S, 3 * percentile(self.beside.gaps_s, 0.5))
        return percentile(self.beside.gaps_s, 0.99) <= limit

    @property
    def described(self) -> str:
        first, last = self.quiet[0], self.quiet[-1]
        return (
            f"attacks: {dict(self.attacks.most_common())}\nstatuses: {dict(sorted(self.statuses.items()))}, "
            f"{len(self.unexpected)} unexpected\n"
            f"good clients alone: {self.alone.described}\n              beside: {self.beside.described}\n"
            f"{self.crashes} crashes, {self.traces} tracebacks\nat the beginning: {first}\nat the end: {last}\n"
            f"leaks: {'; '.join(self.leaks) or 'none'}"
        )


class Siege:
    """Attacks one server in rounds.

    model     the arguments of `llmrun serve` that name the model
    attack_s  the length of an attack in seconds
    quiet_s   how long the good clients are alone after each attack
    """

    def __init__(
        self,
        model: Sequence[str],
        folder: Path,
        *,
        seed: int,
        attack_s: float = 120.0,
        quiet_s: float = 15.0,
        idle: int = IDLE,
        context: int = 2048,
    ) -> None:
        self._folder, self._seed, self._idle = folder, seed, idle
        self._attack_s, self._quiet_s = attack_s, quiet_s
        keys = folder / "keys.txt"
        keys.write_text("\n".join(_KEYS))
        keys.chmod(0o600)
        sizes = ["--parallel", "8", "--ctx-size", str(context), "--kv-tokens", str(4 * context)]
        self._arguments = [*model, *sizes, "--api-key-file", str(keys), "--open-metrics"]

    def run(self, minutes: float, say: Callable[[str], None] = lambda line: None) -> Besieged:
        """Attack for some minutes, at least one round."""
        found, deadline = Besieged(), time.monotonic() + 60 * minutes
        with serve(*self._arguments, log=self._folder / "siege.log") as server:
            asked = [one for one in random_requests(self._seed, 24, with_tools=False) if _is_regular(one.features)]
            clients = GoodClients(server.port, _KEYS[0], asked)
            clients.learn()
            _add(found.alone, clients.run(self._quiet_s))
            found.quiet.append(self._settled(server))
            while time.monotonic() < deadline or len(found.quiet) < 2:
                self._attack(server, clients, found)
                found.quiet.append(self._settled(server))
                found.leaks = leaks(found.quiet)
                _add(found.alone, clients.run(self._quiet_s))
                say(f"round {len(found.quiet) - 1}\n{found.described}\n")
            found.crashes = int(settled_metrics(server)["engine_restarts_total"]) + server.has_ended
            found.traces = server.log.read_bytes().count(b"Traceback")
        return found

    def _attack(self, server: Served, clients: GoodClients, found: Besieged) -> None:
        number = len(found.quiet)
        arguments = (server.port, _KEYS[1], self._seed + number, self._attack_s, self._idle)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.serving.attacks", *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        _add(found.beside, clients.run(self._attack_s))
        output, _ = process.communicate(timeout=self._attack_s + _SETTLE_S)
        if process.returncode:
            raise RuntimeError(f"the attacks ended with {process.returncode}")
        attacks, statuses, unexpected = json.loads(output)
        found.attacks += Counter(attacks)
        found.statuses += Counter(statuses)
        found.unexpected += unexpected

    def _settled(self, server: Served) -> Resources:
        """Wait until the server has no connections and no requests, and measure it."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            resources, metrics = server.resources(), server.metrics()
            busy = metrics["open_requests"] - 1 + metrics["requests_running"] + metrics["requests_waiting"]
            if (not busy and not resources.connections) or time.monotonic() > deadline:
                time.sleep(_TRIMMED_S)
                return server.resources()
            time.sleep(0.2)


def leaks(quiet: Sequence[Resources]) -> list[str]:
    """Return in words what has grown between the beginning and the end, or for memory, since the middle."""
    first, last = quiet[0], quiet[-1]
    warm = quiet[len(quiet) // 3 : 2 * len(quiet) // 3] if len(quiet) > _LEAST_ROUNDS else []
    found = [
        f"{name}: {getattr(first, name)} -> {getattr(last, name)}"
        for name in ("files", "front_files", "helpers")
        if getattr(last, name) > getattr(first, name) + _MOST_FILES
    ]
    if last.connections:
        found.append(f"{last.connections} connections")
    factor, more = _MOST_GROWTH
    for name in ("memory", "front_memory"):
        before, after = max((getattr(one, name) for one in warm), default=0), getattr(last, name)
        if before and after > factor * before + more:
            found.append(f"{name}: {before:,} -> {after:,} bytes")
    return found


def _is_regular(features: tuple[str, ...]) -> bool:
    return not set(features) & set(_FEATURES)


def _add(total: Experience, more: Experience) -> None:
    total.answers += more.answers
    total.different += more.different
    total.gaps_s += more.gaps_s
    total.firsts_s += more.firsts_s
    total.refused += more.refused
    total.problems += more.problems
