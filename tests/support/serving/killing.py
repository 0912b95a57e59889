"""Kills the process of a served model at random moments under load, and compares the answers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.base.errors import LlmrunError
from llmrun.engine.child.messages import Open
from llmrun.serving.processes.model_process import ModelProcess
from llmrun.serving.processes.served_model import State
from llmrun.serving.processes.supervisor import ServingLimits
from tests.support.serving.processes import Heard, hear, noise, running, until

CLIENTS = 8  # twice as many as run at a time, so that some requests are in the queue
LIMITS = ServingLimits(first_pause_s=0.05, max_pause_s=0.05)
REQUESTS = [noise(seed, 10 + 7 * (seed % 5)) for seed in range(24)]


@dataclass(slots=True)
class Tally:
    """The outcome of a run.

    replayed   requests that had begun when their process was killed
    failed     requests that ended with an error
    different  answers that differ from those of a process that nobody killed
    """

    kills: int = 0
    requests: int = 0
    replayed: int = 0
    failed: int = 0
    different: int = 0


async def kill_under_load(model: Open, *, kills: int, seed: int) -> Tally:
    """Kill the process `kills` times while clients ask one request after another.

    A request fails at its second death. Therefore, the process is killed again only once the requests that had begun at
    its previous death are over.
    """
    chance, tally = random.Random(seed), Tally()
    async with running(model, LIMITS) as process:
        expected = [await hear(process, request) for request in REQUESTS]
        clients = [asyncio.create_task(_ask_on(process, n, expected, kills, tally)) for n in range(CLIENTS)]
        while tally.kills < kills:
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            await until(lambda: process.state is State.READY and not _died(process) and process.load.running)
            os.kill(process.pid or 0, signal.SIGKILL)
            await until(lambda: process.state is State.RESTARTING)
            tally.replayed += _died(process)
            tally.kills += 1
        await asyncio.gather(*clients)
    return tally


async def _ask_on(process: ModelProcess, first: int, expected: Sequence[Heard], kills: int, tally: Tally) -> None:
    """Ask one request after another until the last kill."""
    number = first
    while tally.kills < kills:
        number = (number + CLIENTS - 1) % len(REQUESTS)
        try:
            heard = await hear(process, REQUESTS[number])
            tally.different += heard.pieces != expected[number].pieces
        except LlmrunError:
            tally.failed += 1
        tally.requests += 1


def _died(process: ModelProcess) -> int:
    """Return how many requests in progress had begun when their process ended."""
    return sum(request.deaths > 0 for request in process._requests.values())
