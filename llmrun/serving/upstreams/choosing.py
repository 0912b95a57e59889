"""Chooses an upstream: the one that has probably cached the longest prefix of the conversation, unless it is too busy.

The servers cache prefixes in tokens, which this server does not know. It compares the text of the request instead, at
positions that grow by a quarter. So a conversation of any length takes at most 45 hashes, and the prefix that is found
is at least 80 % of the common one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

from llmrun.serving.protocol.wire import json_bytes

# The fields that determine a prompt, in the order in which templates place them.
_FIELDS: Final = ("model", "instructions", "system", "tools", "input_prefix", "prompt", "input", "messages")
_SHORTEST: Final = 64  # bytes
_LONGEST: Final = 1 << 20  # bytes; hashing so many takes a millisecond
_SLACK: Final = 4  # requests; small differences in load do not matter
_MOST_PREFIXES: Final = 8192  # per tenant, about 1 MB


def _positions() -> tuple[int, ...]:
    positions = [0, _SHORTEST]
    while positions[-1] < _LONGEST:
        positions.append(-(-positions[-1] * 5 // 4))
    return tuple(positions)


_POSITIONS: Final = _positions()


def prefix_hashes(body: Mapping[str, Any]) -> list[bytes]:
    """Return the hashes of prefixes of a request's text, shortest first."""
    text = b"\0".join(json_bytes(body[name]) for name in _FIELDS if name in body)
    running, hashes = blake2b(digest_size=12), []
    for start, end in pairwise(_POSITIONS):
        if end >= len(text):  # the last byte closes the last field, which may continue in the next request
            break
        running.update(text[start:end])
        hashes.append(running.digest())
    return hashes


class SentPrefixes:
    """Remembers which prefix was last sent to which upstream.

    Each tenant has a table of its own. Otherwise, the choice of an upstream, which shows in the time to the first
    token, would tell one tenant what another one has asked.
    """

    def __init__(self, most: int = _MOST_PREFIXES) -> None:
        self._most = most
        self._tables: dict[str, OrderedDict[bytes, int]] = {}

    def longest(self, tenant: str, hashes: Sequence[bytes], among: Collection[int]) -> int | None:
        """Return which of the upstreams in `among` was sent the longest prefix, or None if none was sent any."""
        table: Mapping[bytes, int] = self._tables.get(tenant, {})
        return next((table[one] for one in reversed(hashes) if table.get(one) in among), None)

    def remember(self, tenant: str, hashes: Sequence[bytes], upstream: int) -> None:
        """Remember that these prefixes were sent to an upstream. The least recently sent ones are forgotten."""
        table = self._tables.setdefault(tenant, OrderedDict())
        for one in reversed(hashes):  # so that the longest prefixes are forgotten first
            table[one] = upstream
            table.move_to_end(one)
        while len(table) > self._most:
            table.popitem(last=False)


def chosen(loads: Mapping[int, tuple[int, int]], preferred: int | None) -> int:
    """Return the upstream to use.

    loads      requests in progress, and all requests so far, for each upstream; among equally busy ones, the one with
               the fewest so far is next
    preferred  the upstream that has cached the prefix, if any does
    """
    least = min(loads, key=lambda one: (*loads[one], one))
    if preferred is not None and 2 * loads[preferred][0] <= 3 * loads[least][0] + 2 * _SLACK:
        return preferred
    return least
