"""Decides which worker runs which call, so that calls with the same prefix run on one machine, one after another."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmrun.jobs.batching.records import LineId
from llmrun.jobs.batching.requests import Call

_CUTS = 32  # places that are compared when a range is divided


@dataclass(eq=False, slots=True)
class Job:
    """A call to answer, and the lines that ask for it.

    losses  how many workers were lost while they ran the call
    """

    call: Call
    lines: list[LineId] = field(default_factory=list)
    losses: int = 0
    prefix: str = ""


def prefix_of(call: Call) -> str:
    """Return a text that begins the same for calls whose prompts begin the same, as far as templates allow.

    It is made from the texts of the messages rather than from tokens, because a server's tokens are unknown here.
    """
    body = call.body
    if "prompt" in body:
        return f"prompt {_text(body['prompt'])}"
    before = [_text(body.get(name)) for name in ("tools", "chat_template_kwargs", "reasoning_effort")]
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            before += [_text(message.get("role")), _text(message.get("content"))]
    return "\x1f".join(before)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class WorkQueue:
    """The calls that no worker has, sorted by their prefixes.

    A worker takes its calls from one range. When that is empty, it steals half of the largest other range, which is
    divided where two neighbors have the shortest common prefix.
    """

    def __init__(self) -> None:
        self._returned: deque[Job] = deque()
        self._unowned: list[deque[Job]] = []
        self._ranges: dict[Hashable, deque[Job]] = {}

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._unowned)) + sum(map(len, self._ranges.values()))

    def add(self, jobs: Iterable[Job]) -> None:
        """Add calls."""
        jobs = list(jobs)
        for job in jobs:
            job.prefix = prefix_of(job.call)
        jobs.sort(key=lambda job: job.prefix)
        if jobs:
            self._unowned.append(deque(jobs))

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Return calls of a lost worker. They are the next ones that any worker gets."""
        self._returned.extend(jobs)

    def take(self, owner: Hashable) -> Job | None:
        """Return the next call for a worker, or None if there are no calls at all."""
        if self._returned:
            return self._returned.popleft()
        if not self._ranges.get(owner):
            self._ranges[owner] = self._new_range()
        own = self._ranges[owner]
        return own.popleft() if own else None

    def leave(self, owner: Hashable) -> None:
        """Give the range of a lost worker to the others."""
        left = self._ranges.pop(owner, None)
        if left:
            self._unowned.append(left)

    def _new_range(self) -> deque[Job]:
        if self._unowned:
            return self._unowned.pop(0)
        largest = max(self._ranges.values(), key=len, default=deque())
        cut = _best_cut(largest) if len(largest) > 1 else 0
        return deque(reversed([largest.pop() for _ in range(len(largest) - cut)]))


def _best_cut(jobs: Sequence[Job]) -> int:
    """Return where to divide sorted calls: in the middle half, where two neighbors have the least in common."""
    first, last = max(1, len(jobs) // 4), max(2, 3 * len(jobs) // 4)
    step = max(1, (last - first) // _CUTS)
    cuts = sorted(range(first, last, step), key=lambda cut: abs(cut - len(jobs) / 2))
    return min(cuts, key=lambda cut: _common(jobs[cut - 1].prefix, jobs[cut].prefix))


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
