"""Asks a server how many requests it is working on: from its metrics, its slots or its health."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from llmrun.engine.remote.busyness import unfinished_in_metrics
from llmrun.jobs.bench.serving.sender import Sender

_LOOKS_S = 0.02


async def unfinished(sender: Sender) -> tuple[int, str] | None:
    """Return how many requests run or wait on the server and the path that says so, or None if no path does."""
    for path, read in (("/metrics", unfinished_in_metrics), ("/slots", _in_slots), ("/health", _in_health)):
        found = await sender.get(path)
        if found.status == 200 and not found.problem:
            count = read(found.body.decode(errors="replace"))
            if count is not None:
                return count, path
    return None


async def wait_until_idle(sender: Sender, limit_s: float) -> tuple[int, str, float] | None:
    """Wait until nothing runs on the server, for at most `limit_s` seconds.

    Returns the number of requests that still run or wait, the path that says so, and the seconds that have passed, or
    None if the server does not report its requests.
    """
    started = time.perf_counter()
    while (found := await unfinished(sender)) is not None:
        passed = time.perf_counter() - started
        if found[0] == 0 or passed > limit_s:
            return *found, passed
        await asyncio.sleep(_LOOKS_S)
    return None


def _in_slots(text: str) -> int | None:
    slots = _json(text)
    if not isinstance(slots, list) or not all(isinstance(slot, dict) and "is_processing" in slot for slot in slots):
        return None
    return sum(bool(slot["is_processing"]) for slot in slots) if slots else None


def _in_health(text: str) -> int | None:
    body = _json(text)
    counts = [body.get(name) for name in ("running", "waiting")] if isinstance(body, dict) else []
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
