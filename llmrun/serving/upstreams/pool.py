"""The upstreams of a server, and a task for each that asks it every few seconds whether it is up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from llmrun.base.errors import LlmrunError
from llmrun.serving.upstreams.choosing import SentPrefixes, chosen
from llmrun.serving.upstreams.hops import Hops
from llmrun.serving.upstreams.upstream import UNASKED, Upstream


@dataclass(frozen=True, slots=True)
class Pace:
    """How often upstreams are asked whether they are up. All times are in seconds.

    every_s    the time between two questions to one that is up
    first_s    the time until one that has just failed is asked again; it doubles with each further failure
    longest_s  the longest time between two questions to one that is down
    answer_s   how long the answer may take
    silent_s   requests to an upstream that is down are cut if it has been silent for this long
    """

    every_s: float = 5.0
    first_s: float = 0.1
    longest_s: float = 10.0
    answer_s: float = 10.0
    silent_s: float = 60.0


PACE: Final = Pace()


class Pool:
    """The upstreams.

    note  called with a line for the user when an upstream goes up or down
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
        """Start asking all upstreams regularly, and wait until each has been asked once."""
        self._tasks = [asyncio.create_task(self._keep_asking(one)) for one in self.upstreams]
        await asyncio.gather(*(asked.wait() for asked in self._asked))

    def stop(self) -> None:
        """Cut all requests, and choose no upstream from now on."""
        self.is_stopped = True
        for upstream in self.upstreams:
            upstream.cut_all()
        self._announce()

    async def close(self) -> None:
        """Stop asking, and close all connections. Idempotent."""
        self.stop()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in self.upstreams:
            await upstream.client.aclose()

    def having(self, model: str) -> list[Upstream]:
        """Return the upstreams that are up and list a model."""
        return [] if self.is_stopped else [upstream for upstream in self.upstreams if model in upstream.models]

    def choose(self, among: Collection[Upstream], tenant: str, hashes: Sequence[bytes]) -> Upstream | None:
        """Return the upstream for a request, or None if there is none to choose from. See choosing.py.

        hashes  of the prefixes of the request
        """
        if not among:
            return None
        loads = {one.number: (one.load, one.counts.requests) for one in among}
        number = chosen(loads, self._prefixes.longest(tenant, hashes, loads))
        self._prefixes.remember(tenant, hashes, number)
        return self.upstreams[number]

    def report(self, upstream: Upstream, problem: str) -> None:
        """Record that a connection to an upstream failed. It counts as down until it has answered a question."""
        self._failures[upstream.number] = 0
        self._set_down(upstream, problem)
        self._hurry[upstream.number].set()

    async def changed(self, until: float) -> bool:
        """Wait until an upstream goes up, but only until the time `until` of the event loop's clock.

        Returns False if the time is over or the pool is stopped.
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
        """Return the time until the next question, which is random so that many servers do not ask at once."""
        pace, failures = self._pace, self._failures[upstream.number]
        pause = pace.every_s if upstream.is_up else min(pace.first_s * 2 ** min(failures, 20), pace.longest_s)
        return pause * random.uniform(0.8, 1.2)

    async def _ask(self, upstream: Upstream) -> None:
        """Ask an upstream for its models and its load."""
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
            with suppress(TimeoutError):  # only the list of models decides whether it is up
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
