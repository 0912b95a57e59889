"""The main loop of an isolated process. It reads requests from stdin and writes answers to stdout.

When the process is ready, it sends an empty frame. A request consists of two frames: the limits, {"cpu_s", "memory"},
and then the request itself. Every request gets one frame as its answer.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from time import process_time

from llmrun.engine.isolation.frames import decoded, read_frame, write_frame


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer requests with `answer` until stdin closes."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, b"")  # tells the parent that this process is ready
    while (limits := read_frame(requests)) is not None:
        _limit(**decoded(limits))
        if (request := read_frame(requests)) is not None:
            write_frame(answers, answer(request))


def _limit(cpu_s: float, memory: int) -> None:
    """Set operating-system limits, where available, because the parent checks only at intervals."""
    if sys.platform == "win32":
        return  # the parent's watchdog is the only limit
    import resource

    # The extra second lets the parent act first, because its error message is better.
    enough = math.ceil(process_time() + cpu_s) + 1
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, enough, resource.getrlimit(resource.RLIMIT_CPU)[1]),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # unsupported on macOS, or the limit is already lower
            resource.setrlimit(what, (soft, hard))
