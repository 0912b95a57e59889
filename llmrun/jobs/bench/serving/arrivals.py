"""The arrival times of an open loop, in which requests are sent on time whatever the server does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

MOST_REQUESTS = 1_000_000
_BLOCK = 1024


def arrival_times(
    rate: float, seed: int, *, requests: int | None = None, duration: float | None = None, burstiness: float = 1.0
) -> list[float]:
    """Return the times in seconds at which requests arrive, in increasing order.

    The gaps between arrivals follow a gamma distribution with the shape `burstiness`, as in `vllm bench serve`: 1 is a
    Poisson process, lower values are burstier, and higher values are more regular.

    rate      requests per second, on average
    requests  the number of requests
    duration  the time in seconds during which requests arrive; the first limit that is reached counts

    Raises ValueError unless the rate and the burstiness are positive and finite, and there is a limit.
    """
    if not (0 < rate < math.inf and 0 < burstiness < math.inf) or requests is duration is None:
        raise ValueError(f"arrivals: rate {rate:g}, burstiness {burstiness:g}: positive numbers and a limit are needed")
    most = MOST_REQUESTS if requests is None else min(requests, MOST_REQUESTS)
    until = math.inf if duration is None else duration
    times: list[float] = []
    now = 0.0
    for gap in _gaps(rate, burstiness, seed):
        now += gap
        if len(times) >= most or now >= until:
            break
        times.append(now)
    return times


def _gaps(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    random = np.random.default_rng(seed)
    while True:
        yield from random.gamma(burstiness, 1 / (rate * burstiness), _BLOCK).tolist()
