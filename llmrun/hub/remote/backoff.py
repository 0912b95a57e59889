"""Policies for retries and for the number of parallel connections. This module uses neither a clock nor the network."""

from __future__ import annotations

from llmrun.base.errors import NetworkError
from llmrun.hub.remote.http_ranges import TryAgain

TRIES = 6  # consecutive attempts before any byte arrives; users should not wait long for a dead server
# consecutive attempts without progress once bytes have arrived; they take at least 84 s, enough for a router restart
TRIES_ON_THE_WAY = 16
PROGRESS = 64 << 10  # bytes that must arrive to reset the failure count
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 8.0

MOST_CONNECTIONS = 8
PROBE_S = 1.0  # duration of each speed measurement
GAIN = 1.3  # the minimum speedup that justifies doubling the number of connections
WORTH_S = 3.0  # do not measure again if the download will finish in less time than this


class Patience:
    """A counter of consecutive failures. Receiving enough new bytes resets it."""

    def __init__(self, file: str, size: int, received: int) -> None:
        self._file, self._size = file, size
        self._farthest = received
        self._failures = 0
        self._tries = TRIES

    def wait_after(self, trouble: TryAgain, received: int) -> float:
        """Return the delay in seconds before the next attempt. Raises NetworkError after the last attempt."""
        if received >= self._farthest + PROGRESS:
            self._farthest, self._failures, self._tries = received, 0, TRIES_ON_THE_WAY
        self._failures += 1
        if self._failures >= self._tries:
            count = f"gave up after {self._tries} tries, with {received:,} of {self._size:,} bytes received"
            raise NetworkError(f"{self._file}: {trouble}: {count}", hint=trouble.hint) from trouble
        return max(trouble.after, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._failures - 1)))


class Growth:
    """A controller for the number of parallel connections of a download.

    It starts with one connection and doubles the number as long as that measurably increases the speed. Some servers
    and networks limit the speed of each connection, but most do not.
    """

    def __init__(self, now: float, received: int) -> None:
        self._since, self._from = now, received
        self._rate = 0.0  # bytes per second, measured with half as many connections
        self._settled = False

    def advise(self, now: float, received: int, missing: int, connections: int) -> int:
        """Return the number of connections to use from now on.

        now          seconds, on the same clock as the constructor's `now`
        received     bytes received so far
        missing      bytes not received yet
        connections  the number of connections since the last call
        """
        if self._settled or now - self._since < PROBE_S:
            return connections
        rate = (received - self._from) / (now - self._since)
        if rate <= 0.0:  # the speed of a stalled download says nothing about the number of connections
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
