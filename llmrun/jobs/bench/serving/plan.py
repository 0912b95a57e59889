"""The plan of a serving benchmark, as chosen on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RANDOM, SHARED_PREFIX, MIXED, OVERLOAD, CANCEL, SAME = "random", "shared-prefix", "mixed", "overload", "cancel", "same"
WORKLOADS = (RANDOM, SHARED_PREFIX, MIXED, OVERLOAD, CANCEL)  # SAME has a flag of its own.

CONCURRENCY = 16
DURATION_S = 30.0
CANCELLED_REQUESTS = 48
COMPARED_PROMPTS = 24
OVERLOAD_FACTOR = 2.0
_DEPTHS = {SHARED_PREFIX: 1024, MIXED: 4096, SAME: 256}


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
    concurrency  the number of clients in a closed loop, in the calibration and in SAME
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
        if self.workload == CANCEL:
            return ""
        if self.rate is None:
            return f"{self.concurrency} clients"
        if self.rate.is_multiple:
            return f"open loop at {self.rate.value:g}x capacity"
        return f"open loop at {self.rate.value:g} requests/s"
