"""The plan of a serving benchmark, as chosen on the command line, with its service-level objectives."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmrun.base.errors import UsageError

METRICS = ("ttft", "tpot", "itl", "e2e")
_ALIASES = {"e2el": "e2e"}  # vLLM's name for E2E is e2el.
_UNITS = {"": 1e-3, "ms": 1e-3, "s": 1.0}  # As in vLLM, a number without a unit is in milliseconds.
_LIMIT = re.compile(r"(\w+):(\d+(?:\.\d+)?|\.\d+)(ms|s|)")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Parse limits like `"ttft:500,itl:150"` or `"ttft:0.5s itl:150ms"`. Return limits in seconds, by metric.

    Raises UsageError for an unknown metric, a limit that is not a positive number, or a metric that is given twice.
    """
    limits: dict[str, float] = {}
    for part in re.split(r"[,\s]+", ",".join(texts).strip()):
        match = _LIMIT.fullmatch(part)
        name = _ALIASES.get(match[1], match[1]) if match else ""
        if match is None or name not in METRICS:
            raise UsageError(
                f"--goodput: {part!r} is not a limit for one of {', '.join(METRICS)}",
                hint="example: --goodput ttft:500,itl:150 (milliseconds)",
            )
        limit = float(match[2]) * _UNITS[match[3]]
        if not 0 < limit < math.inf:
            raise UsageError(f"--goodput: {part!r}: the limit must be above 0")
        if name in limits:
            raise UsageError(f"--goodput: {name} has two limits")
        limits[name] = limit
    return limits


def meets(values: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Return whether a request meets all limits. A limit on a metric that the request lacks always counts as met.

    values  metric -> seconds; an answer of one token has neither TPOT nor ITL
    """
    return all(name not in values or values[name] <= limit for name, limit in limits.items())


def goodput_words(limits: Mapping[str, float]) -> str:
    """Format limits as `TTFT <= 500 ms, ITL <= 150 ms`."""
    return ", ".join(f"{name.upper()} <= {limit * 1e3:g} ms" for name, limit in limits.items())


CONCURRENCY = 16
DURATION_S = 30.0


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """One run on one server.

    rate         requests per second of an open loop, or None for a closed loop
    requests     the number of requests, or None
    duration     seconds during which requests are sent; used if `requests` is None
    concurrency  the number of clients in a closed loop
    prompt, generate  the number of words of a prompt, and the number of tokens of an answer
    limits       metric -> limit in seconds, for goodput
    seed         determines the prompts and the arrivals
    """

    rate: float | None = None
    requests: int | None = None
    duration: float | None = None
    burstiness: float = 1.0
    concurrency: int = CONCURRENCY
    prompt: int = 512
    generate: int = 128
    limits: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def sending_s(self) -> float | None:
        """The seconds during which requests are sent, or None if the number of requests is limited instead."""
        if self.duration is None and self.requests is None:
            return DURATION_S
        return self.duration
