"""Probes an idle server before a run, to learn what it supports and how fast it is."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrun.base.errors import NetworkError
from llmrun.engine.remote.connection import Call
from llmrun.jobs.bench.serving.workloads import RequestMaker

if TYPE_CHECKING:
    from llmrun.engine.remote.client import RemoteModel

_TOKENS = 16  # the length of the answers
_FIRST = 1 << 33  # the number of the first prompt, which no run uses
_MOST_EVENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """The results of probing a server.

    ttft, tpot     seconds on an idle server
    left_out       the fields beyond OpenAI's API that the server rejects
    counts_tokens  whether the server reports token counts in streams
    """

    ttft: float
    tpot: float
    left_out: tuple[str, ...]
    counts_tokens: bool


def probed(model: RemoteModel, maker: RequestMaker, rounds: int = 2) -> Probe:
    """Send a request to warm up, then `rounds` requests of the plan's prompt length, one at a time.

    Raises NetworkError, ModelNotFound and ContextExceeded.
    """
    _alone(model, maker, _FIRST, 2)
    found = [_alone(model, maker, _FIRST + 1 + number, _TOKENS) for number in range(rounds)]
    if any(probe.ttft == math.inf for probe in found):
        raise NetworkError(f"nothing to measure: {model.endpoint.host}: an answer had no text")
    best = min(found, key=lambda probe: probe.ttft)
    return replace(best, tpot=min(probe.tpot for probe in found))


def _alone(model: RemoteModel, maker: RequestMaker, index: int, tokens: int) -> Probe:
    wire = maker.wire(maker.words(index, maker.plan.prompt), min(tokens, maker.plan.generate))
    sent = time.perf_counter()
    moments, counts_tokens = [], False
    for chunk in model.stream(wire.path, wire.body, wire.extras, Call(), most_events=_MOST_EVENTS):
        if chunk.text or chunk.reasoning:
            moments.append(chunk.arrived)
        counts_tokens = counts_tokens or chunk.usage is not None
    ttft = moments[0] - sent if moments else math.inf
    tpot = (moments[-1] - moments[0]) / max(1, len(moments) - 1) if moments else 0.0
    return Probe(ttft, tpot, model.left_out, counts_tokens)
