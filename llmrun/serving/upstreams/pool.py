"""The upstreams of a server: checks every few seconds which upstreams are up, and chooses one for each request.

The pool chooses the upstream that has probably cached the longest prefix of the conversation, unless that upstream is
too busy. Upstreams cache prefixes in tokens, which this server does not know. The pool compares the request's text
instead, at positions that grow by a factor of 1.25. So a conversation of any length needs at most 45 hashes, and the
prefix found is at least 80 % as long as the actual common prefix.

`Hops` detects loops between servers that are each other's upstreams. Every server with upstreams has a random name. The
server adds this name to the `Via` header (RFC 9110, 7.6.3) of the requests that it sends, and to the models that it
lists for other servers. A server refuses requests that return to it, and ignores listed models that lead back to it.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

from starlette.datastructures import Headers

from llmrun.base.errors import LlmrunError
from llmrun.serving.protocol.wire import json_bytes
from llmrun.serving.refusals import SERVER, Refused
from llmrun.serving.upstreams.upstream import UNASKED, Upstream

MOST_HOPS: Final = 8
_OURS: Final = re.compile(r"\bllmrun-[0-9a-f]{16}\b")
_FIELD: Final = "via"  # the field of a listed model that contains the names of all servers on the path to the model


class Hops:
    """The name of this server, with checks for requests and models that lead back to this server."""

    def __init__(self) -> None:
        self.name = f"llmrun-{secrets.token_hex(8)}"

    def via(self, headers: Headers) -> str:
        """Return the Via header for a forwarded request. Raises Refused if the request would loop."""
        passed = _OURS.findall(",".join(headers.getlist(_FIELD)))
        if self.name in passed:
            words = "the request came back to this server, because its upstreams forward to it"
            raise Refused(508, f"{words}; remove one --upstream", kind=SERVER, code="loop_detected")
        if len(passed) >= MOST_HOPS:
            words = f"the request has passed {len(passed)} servers, the limit is {MOST_HOPS}"
            raise Refused(508, f"{words}; remove one --upstream", kind=SERVER, code="loop_detected")
        return ", ".join(f"1.1 {name}" for name in (*passed, self.name))

    def first_via(self) -> str:
        """Return the Via header for a request that originates from this server."""
        return f"1.1 {self.name}"

    def leads_back(self, model: Mapping[str, Any]) -> bool:
        """Return whether the path to a listed model passes through this server or has too many hops."""
        names = _names(model)
        return self.name in names or len(names) >= MOST_HOPS

    def shown_to(self, headers: Headers, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model as this server lists it. Only other servers receive the names of the servers on the path."""
        shown = {name: value for name, value in model.items() if name != _FIELD}
        if _OURS.search(",".join(headers.getlist(_FIELD))):
            shown[_FIELD] = [self.name, *_names(model)]
        return shown


def _names(model: Mapping[str, Any]) -> list[str]:
    names = model.get(_FIELD)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


# The fields that determine a prompt, in the order in which templates place them.
_FIELDS: Final = ("model", "instructions", "system", "tools", "input_prefix", "prompt", "input", "messages")
_SHORTEST: Final = 64  # bytes
_LONGEST: Final = 1 << 20  # bytes; hashing this many bytes takes a millisecond
_SLACK: Final = 4  # requests; small differences in load do not matter
_MOST_PREFIXES: Final = 8192  # the number of prefixes per tenant, about 1 MB


def _positions() -> tuple[int, ...]:
    positions = [0, _SHORTEST]
    while positions[-1] < _LONGEST:
        positions.append(-(-positions[-1] * 5 // 4))
    return tuple(positions)


_POSITIONS: Final = _positions()


def prefix_hashes(body: Mapping[str, Any]) -> list[bytes]:
    """Return the hashes of prefixes of a request's text, shortest first."""
    text = b"\0".join(json_bytes(body[name]) for name in _FIELDS if name in body)
    running, hashes = blake2b(digest_size=12), []
    for start, end in pairwise(_POSITIONS):
        if end >= len(text):  # the last byte closes the last field, which may continue in the next request
            break
        running.update(text[start:end])
        hashes.append(running.digest())
    return hashes


class SentPrefixes:
    """Records the upstream to which each prefix was last sent.

    Each tenant has a separate table. In a shared table, the choice of an upstream, which affects the time to the first
    token, would reveal one tenant's requests to another tenant.
    """

    def __init__(self, most: int = _MOST_PREFIXES) -> None:
        self._most = most
        self._tables: dict[str, OrderedDict[bytes, int]] = {}

    def longest(self, tenant: str, hashes: Sequence[bytes], among: Collection[int]) -> int | None:
        """Return the upstream in `among` that received the longest prefix, or None if no upstream received a prefix."""
        table: Mapping[bytes, int] = self._tables.get(tenant, {})
        return next((table[one] for one in reversed(hashes) if table.get(one) in among), None)

    def remember(self, tenant: str, hashes: Sequence[bytes], upstream: int) -> None:
        """Record that prefixes were sent to an upstream. The least recently sent prefixes are forgotten."""
        table = self._tables.setdefault(tenant, OrderedDict())
        for one in reversed(hashes):  # this order makes the table forget the longest prefixes first
            table[one] = upstream
            table.move_to_end(one)
        while len(table) > self._most:
            table.popitem(last=False)


def chosen_upstream(loads: Mapping[int, tuple[int, int]], preferred: int | None) -> int:
    """Return the index of the upstream to use.

    loads      the requests in progress, and all requests so far, for each upstream; among equally busy upstreams, the
               one with the fewest requests so far is chosen
    preferred  the upstream that has cached the prefix, or None
    """
    least = min(loads, key=lambda one: (*loads[one], one))
    if preferred is not None and 2 * loads[preferred][0] <= 3 * loads[least][0] + 2 * _SLACK:
        return preferred
    return least


@dataclass(frozen=True, slots=True)
class Pace:
    """The intervals and time limits of the upstreams' health checks, in seconds.

    every_s    the interval between health checks of an upstream that is up
    first_s    the time until the first check after a failure, which doubles with each further failure
    longest_s  the longest interval between health checks of an upstream that is down
    answer_s   the time limit for the answer to a health check
    silent_s   the silence after which all requests to an upstream that is down are cut
    """

    every_s: float = 5.0
    first_s: float = 0.1
    longest_s: float = 10.0
    answer_s: float = 10.0
    silent_s: float = 60.0


PACE: Final = Pace()


class Pool:
    """The upstreams of a server.

    note  called with a message for the user when an upstream goes up or down
    """

    def __init__(
        self, upstreams: Sequence[Upstream], hops: Hops, note: Callable[[str], None], pace: Pace = PACE
    ) -> None:
        self.upstreams = upstreams
        self._hops, self._note, self._pace = hops, note, pace
        self._prefixes = SentPrefixes()
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = [asyncio.Event() for _ in upstreams]
        self._hurry = [asyncio.Event() for _ in upstreams]
        self._failures = [0] * len(upstreams)
        self._changed = asyncio.Event()
        self.is_stopped = False

    async def start(self) -> None:
        """Start the regular health checks of all upstreams, and wait until each upstream has been checked once."""
        self._tasks = [asyncio.create_task(self._keep_asking(one)) for one in self.upstreams]
        await asyncio.gather(*(asked.wait() for asked in self._asked))

    def stop(self) -> None:
        """Cut all requests, and stop choosing upstreams."""
        self.is_stopped = True
        for upstream in self.upstreams:
            upstream.cut_all()
        self._announce()

    async def close(self) -> None:
        """Stop the health checks, and close all connections. Idempotent."""
        self.stop()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in self.upstreams:
            await upstream.client.aclose()

    def having(self, model: str) -> list[Upstream]:
        """Return the upstreams that are up and list the model."""
        return [] if self.is_stopped else [upstream for upstream in self.upstreams if model in upstream.models]

    def choose(self, among: Collection[Upstream], tenant: str, hashes: Sequence[bytes]) -> Upstream | None:
        """Return the upstream for a request, or None if `among` is empty.

        hashes  the hashes of the request's prefixes
        """
        if not among:
            return None
        loads = {one.number: (one.load, one.counts.requests) for one in among}
        number = chosen_upstream(loads, self._prefixes.longest(tenant, hashes, loads))
        self._prefixes.remember(tenant, hashes, number)
        return self.upstreams[number]

    def report(self, upstream: Upstream, problem: str) -> None:
        """Record that a connection to an upstream failed. The upstream is down until it passes a health check."""
        self._failures[upstream.number] = 0
        self._set_down(upstream, problem)
        self._hurry[upstream.number].set()

    async def changed(self, until: float) -> bool:
        """Wait until an upstream becomes available, or until the event loop's clock reaches `until`.

        Returns False if the time has passed or the pool is stopped.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        return asyncio.get_running_loop().time() < until and not self.is_stopped

    async def _keep_asking(self, upstream: Upstream) -> None:
        hurry = self._hurry[upstream.number]
        while True:
            await self._ask(upstream)
            self._asked[upstream.number].set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(upstream)):
                    await hurry.wait()
                    await asyncio.sleep(self._pace.first_s)
            hurry.clear()

    def _pause_s(self, upstream: Upstream) -> float:
        """Return the random time until the next health check. Jitter keeps servers from polling at the same time."""
        pace, failures = self._pace, self._failures[upstream.number]
        pause = pace.every_s if upstream.is_up else min(pace.first_s * 2 ** min(failures, 20), pace.longest_s)
        return pause * random.uniform(0.8, 1.2)

    async def _ask(self, upstream: Upstream) -> None:
        """Request the models and the load of an upstream."""
        pace, headers = self._pace, {"via": self._hops.first_via()}
        try:
            async with asyncio.timeout(pace.answer_s):
                models = await upstream.ask_models(headers, pace.answer_s)
        except TimeoutError:
            self._failed(upstream, f"no answer within {pace.answer_s:g} s")
        except LlmrunError as error:
            self._failed(upstream, str(error))
        else:
            self._set_up(upstream, {name: model for name, model in models.items() if not self._hops.leads_back(model)})
            with suppress(TimeoutError):  # only the list of models decides whether the upstream is up
                async with asyncio.timeout(pace.answer_s):
                    await upstream.ask_load(headers, pace.answer_s)

    def _failed(self, upstream: Upstream, problem: str) -> None:
        self._failures[upstream.number] += 1
        self._set_down(upstream, problem)
        if asyncio.get_running_loop().time() - upstream.heard_at > self._pace.silent_s:
            upstream.cut_all()

    def _set_down(self, upstream: Upstream, problem: str) -> None:
        if upstream.is_up or upstream.problem == UNASKED:
            self._note(f"upstream {upstream.endpoint.host}: down: {problem}")
        upstream.problem, upstream.models = problem, {}

    def _set_up(self, upstream: Upstream, models: Mapping[str, Mapping[str, Any]]) -> None:
        if not upstream.is_up:
            some = "no models" if not models else ", ".join(sorted(models))
            self._note(f"upstream {upstream.endpoint.host}: up: {upstream.shown(some)}")
        upstream.problem, upstream.models = "", models
        self._failures[upstream.number] = 0
        self._announce()

    def _announce(self) -> None:
        """Wake the requests that wait for an upstream."""
        self._changed.set()
        self._changed = asyncio.Event()
