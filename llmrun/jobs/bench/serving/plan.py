"""The plan of a serving benchmark, as chosen on the command line, with its service-level objectives."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmrun.base.errors import UsageError

METRICS = ("ttft", "tpot", "itl", "e2e")
_ALIASES = {"e2el": "e2e"}  # vLLM's name
_UNITS = {"": 1e-3, "ms": 1e-3, "s": 1.0}  # As in vLLM, a number without a unit is in milliseconds.
_LIMIT = re.compile(r"(\w+):(\d+(?:\.\d+)?|\.\d+)(ms|s|)")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Parse limits like `"ttft:500,itl:150"` or `"ttft:0.5s itl:150ms"`. Return metric -> limit in seconds.

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
    """Return whether a request meets all limits. A metric that a request does not have is not limited.

    values  metric -> seconds; an answer of one token has neither TPOT nor ITL
    """
    return all(name not in values or values[name] <= limit for name, limit in limits.items())


def goodput_words(limits: Mapping[str, float]) -> str:
    """Format limits as `TTFT <= 500 ms, ITL <= 150 ms`."""
    return ", ".join(f"{name.upper()} <= {limit * 1e3:g} ms" for name, limit in limits.items())


RANDOM, SHARED_PREFIX, MIXED, OVERLOAD = "random", "shared-prefix", "mixed", "overload"
WORKLOADS = (RANDOM, SHARED_PREFIX, MIXED, OVERLOAD)

CONCURRENCY = 16
DURATION_S = 30.0
OVERLOAD_FACTOR = 2.0
_DEPTHS = {SHARED_PREFIX: 1024, MIXED: 4096}


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate in requests per second or, if `is_multiple`, as a multiple of the measured capacity."""

    value: float
    is_multiple: bool = False


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """One run on one server.

    rate         None for a closed loop
    requests     the number of requests, or None
    duration     seconds during which requests are sent; used if `requests` is None
    concurrency  the number of clients in a closed loop and in the calibration
    prompt, generate  words of a prompt, tokens of an answer
    depth        words of the common prefix or of the long prompts; 0 for the workload's default
    limits       metric -> limit in seconds, for goodput
    seed         determines the prompts and the arrivals
    """

    workload: str = RANDOM
    rate: Rate | None = None
    requests: int | None = None
    duration: float | None = None
    burstiness: float = 1.0
    concurrency: int = CONCURRENCY
    prompt: int = 512
    generate: int = 128
    depth: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def prefix(self) -> int:
        """The words of the common prefix or of the long prompts."""
        return self.depth or _DEPTHS.get(self.workload, 0)

    @property
    def sending_s(self) -> float | None:
        """The seconds during which requests are sent, or None if their number is limited instead."""
        if self.duration is None and self.requests is None:
            return DURATION_S
        return self.duration

    @property
    def loop_words(self) -> str:
        """The kind of loop, such as `open loop at 2.5 requests/s` or `16 clients`."""
        if self.rate is None:
            return f"{self.concurrency} clients"
        if self.rate.is_multiple:
            return f"open loop at {self.rate.value:g}x capacity"
        return f"open loop at {self.rate.value:g} requests/s"
