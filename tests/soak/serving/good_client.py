"""A well-behaved client, which checks every byte of its answers and measures how long it waits for them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.soak.serving.comparing import Incomplete, comparable_text
from tests.soak.serving.requests import Asked

CLIENTS = 2
_PATIENCE_S = 120.0


@dataclass
class Experience:
    """The experience of one client.

    gaps_s    the times between the events of its streams, in seconds
    firsts_s  the times until the first byte of an answer
    refused   status -> how often the server refused a request
    """

    answers: int = 0
    different: int = 0
    gaps_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def harmed(self) -> int:
        return self.different + sum(self.refused.values()) + len(self.problems)

    @property
    def described(self) -> str:
        gaps = "/".join(f"{1e3 * percentile(self.gaps_s, share):.0f}" for share in (0.5, 0.99, 1.0))
        firsts = "/".join(f"{1e3 * percentile(self.firsts_s, share):.0f}" for share in (0.5, 0.99, 1.0))
        return (
            f"{self.answers} answers, {self.different} differ, refused {dict(self.refused)}, {len(self.problems)} "
            f"failed; p50/p99/max between tokens {gaps} ms, to the first byte {firsts} ms"
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed, or 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class GoodClients:
    """Clients that keep their connections open and ask one request after another.

    key  the API key
    """

    def __init__(self, port: int, key: str, asked: Sequence[Asked]) -> None:
        self._port, self._key, self._asked = port, key, asked
        self._expected: list[str] = []

    def learn(self) -> None:
        """Ask every request once, to know the answers."""
        line, found = self._connect(), Experience()
        self._expected = [self._ask(line, asked, found)[1] for asked in self._asked]
        line.close()

    def run(self, seconds: float) -> Experience:
        """Ask for some seconds, and compare the answers."""
        found = Experience()
        stop = time.monotonic() + seconds
        threads = [threading.Thread(target=self._ask_on, args=(first, stop, found)) for first in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _ask_on(self, first: int, stop: float, found: Experience) -> None:
        line, number = self._connect(), first
        while time.monotonic() < stop:
            number = (number + CLIENTS) % len(self._asked)
            try:
                status, answer = self._ask(line, self._asked[number], found)
                if status != 200:
                    found.refused[status] += 1
                    time.sleep(0.2)
                else:
                    found.answers += 1
                    found.different += answer != self._expected[number]
            except (OSError, http.client.HTTPException, Incomplete) as error:
                found.problems.append(f"{type(error).__name__}: {error}: {self._asked[number].described}")
                line.close()
                line = self._connect()
        line.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_S)

    def _ask(self, line: http.client.HTTPConnection, asked: Asked, found: Experience) -> tuple[int, str]:
        """Return the status and the answer in comparable form."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        began = time.perf_counter()
        line.request("POST", asked.path, json.dumps(asked.body), headers)
        response = line.getresponse()
        moments, parts = [], []
        while part := response.readline():
            if part.startswith((b"data: ", b"{")):
                moments.append(time.perf_counter())
            parts.append(part)
        response.read()  # so that the connection can be used again
        if response.status != 200:
            return response.status, ""
        found.firsts_s.append(moments[0] - began)
        found.gaps_s += [later - earlier for earlier, later in pairwise(moments)]
        kind = response.headers.get("Content-Type", "")
        return 200, comparable_text(b"".join(parts), kind)
