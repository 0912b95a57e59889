"""The requests of the workloads, each of which depends only on the seed and its number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmrun.engine.remote.request import RemoteRequest, remote_request
from llmrun.engine.requests import Request, TextPrompt
from llmrun.jobs.bench.measuring.asking import random_words
from llmrun.jobs.bench.serving.driving import Planned
from llmrun.jobs.bench.serving.plan import MIXED, SHARED_PREFIX, ServingPlan
from llmrun.jobs.bench.serving.record import Record
from llmrun.options.sampling_params import SamplingParams

LONG, SHORT = "long", "short"
_LONG_EVERY = 16  # In the mixed workload, one of this many requests is long.
_SENT = frozenset({"temperature", "seed"})  # All other sampling parameters are left at the server's defaults.
_PREFIX = 1 << 32  # the number of the random stream for the common prefix


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Creates the requests of a plan.

    left_out  fields beyond OpenAI's API that the server rejects
    """

    plan: ServingPlan
    model: str
    left_out: Sequence[str] = ()

    def request(self, index: int) -> Planned:
        """Return a request of the plan's workload. Requests with different numbers have different prompts."""
        plan = self.plan
        if plan.workload == SHARED_PREFIX:
            return self.completion(index, self.prefix() + self.words(index, plan.prompt))
        if plan.workload == MIXED:
            is_long = index % _LONG_EVERY == _LONG_EVERY // 2
            words = self.words(index, plan.prompt + (plan.prefix if is_long else 0))
            return self.completion(index, words, LONG if is_long else SHORT)
        return self.completion(index, self.words(index, plan.prompt))

    def prefix(self) -> str:
        """Return the common prefix of the plan's prompts."""
        return self.words(_PREFIX, self.plan.prefix)

    def words(self, index: int, count: int) -> str:
        """Return random words, which differ for every index."""
        return random_words(np.random.default_rng([self.plan.seed, index]), max(1, count))

    def completion(self, number: int, text: str, group: str = "") -> Planned:
        """Return the request for a greedy answer to a text."""
        wire = self.wire(text)
        extras = {name: value for name, value in wire.extras.items() if name not in self.left_out}
        return Planned(wire.path, json.dumps(wire.body | extras).encode(), number, group)

    def wire(self, text: str, tokens: int | None = None) -> RemoteRequest:
        """Return the JSON of a request, whose extras some servers reject.

        tokens  the length of the answer; None for the plan's
        """
        sampling = SamplingParams(temperature=0)
        request = Request(TextPrompt(text), tokens or self.plan.generate, sampling=sampling, sent_sampling=_SENT)
        return remote_request(request, self.model, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests whose figures are reported together. `gaps` replaces their ITLs if it is not None."""

    name: str
    records: Sequence[Record]
    gaps: Sequence[float] | None = None


def groups_of(workload: str, records: Sequence[Record]) -> list[Group]:
    """Divide the requests of a workload into groups, of which the first contains all requests."""
    groups = [Group("all", records)]
    if workload == SHARED_PREFIX:
        return [*groups, *_by_prefix(records)]
    if workload == MIXED:
        return [*groups, *_by_company(records)]
    if any(len(record.tries) > 1 for record in records):
        groups += [
            Group("accepted at once", [record for record in records if len(record.tries) == 1]),
            Group("after a 429", [record for record in records if len(record.tries) > 1]),
        ]
    return groups


def _by_prefix(records: Sequence[Record]) -> list[Group]:
    """Divide requests by whether the common prefix had been processed when they were due."""
    ready = min((record.moments[0] for record in records if record.succeeded), default=0.0)
    return [
        Group("prefix new", [record for record in records if record.due < ready]),
        Group("prefix cached", [record for record in records if record.due >= ready]),
    ]


def _by_company(records: Sequence[Record]) -> list[Group]:
    """Divide short requests by whether a long prompt was being processed while they waited for their first text.

    The ITLs beside a long prompt are those of all short requests that overlap with its processing.
    """
    long = [record for record in records if record.group == LONG]
    short = [record for record in records if record.group == SHORT]
    windows = [(record.tries[-1].sent, record.moments[0]) for record in long if record.succeeded]

    def overlaps(start: float, end: float) -> bool:
        return any(start < until and end > since for since, until in windows)

    beside: list[Record] = []
    alone: list[Record] = []
    for record in short:
        answered = record.moments[0] if record.moments else record.ended
        (beside if overlaps(record.due, answered) else alone).append(record)
    gaps_beside: list[float] = []
    gaps_alone: list[float] = []
    for record in short:
        for earlier, later in zip(record.moments, record.moments[1:], strict=False):
            (gaps_beside if overlaps(earlier, later) else gaps_alone).append(later - earlier)
    return [
        Group("short, without a long prompt", alone, gaps_alone),
        Group("short, beside a long prompt", beside, gaps_beside),
        Group("long", long),
    ]
