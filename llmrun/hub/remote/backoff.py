"""When to try again, and when another connection is worth it. Both are arithmetic: no clock, no network."""

from __future__ import annotations

from llmrun.errors import NetworkError
from llmrun.hub.remote.http_ranges import TryAgain

TRIES = 6  # in a row of a server that has not sent anything yet: nobody waits long for one that is not there
TRIES_ON_THE_WAY = 16  # in a row without progress, once something came: at least 84 s, for a router that starts anew
PROGRESS = 64 << 10  # bytes that must have come for a failure not to count with those before it
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 8.0

MOST_CONNECTIONS = 8
PROBE_S = 1.0  # how long each number of connections is measured
GAIN = 1.3  # twice the connections must bring so much more, or they are given back
WORTH_S = 3.0  # what is left must take so long for another measurement to pay


class Patience:
    """Counts failures. Any progress beyond the farthest point so far begins the count anew."""

    def __init__(self, file: str, size: int, received: int) -> None:
        self._file, self._size = file, size
        self._farthest = received
        self._failures = 0
        self._tries = TRIES

    def wait_after(self, trouble: TryAgain, received: int) -> float:
        """Seconds to wait before the next try. Raises NetworkError, with the numbers, when it was the last."""
        if received >= self._farthest + PROGRESS:
            self._farthest, self._failures, self._tries = received, 0, TRIES_ON_THE_WAY
        self._failures += 1
        if self._failures >= self._tries:
            at = f"at {received:,} of {self._size:,} bytes, {self._tries} tries"
            raise NetworkError(f"{self._file}: {trouble}: {at}", hint=trouble.hint) from trouble
        return max(trouble.after, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._failures - 1)))


class Growth:
    """How many connections a download should have. One, unless measuring says that a connection is what limits it:
    then twice as many, as long as that is faster. Many servers and networks limit each connection, most do not."""

    def __init__(self, now: float, received: int) -> None:
        self._since, self._from = now, received
        self._rate = 0.0  # bytes a second, with half as many connections as now
        self._settled = False

    def advise(self, now: float, received: int, missing: int, connections: int) -> int:
        """The number of connections from now on, by what was received with `connections` since the last advice."""
        if self._settled or now - self._since < PROBE_S:
            return connections
        rate = (received - self._from) / (now - self._since)
        if rate <= 0.0:  # a stall says nothing
            self._since = now
            return connections
        if rate < GAIN * self._rate:
            self._settled = True
            return connections // 2
        if connections >= MOST_CONNECTIONS or missing < WORTH_S * rate:
            self._settled = True
            return connections
        self._since, self._from, self._rate = now, received, rate
        return min(connections * 2, MOST_CONNECTIONS)
