"""The main loop of the process that renders chat templates. It reads requests from stdin and writes answers to stdout.

When the process is ready, it sends an empty frame. A request consists of two frames: the limits,
{"cpu_s", "memory"}, and then {"probe": source} or {"source", "variables", "now"}. An answer is [kind, value]:

"text"       the rendered text
"abilities"  the result of probing the template
"refuses"    the template's reason for rejecting the conversation
"failed"     the error in the template
"over"       the exceeded limit, "memory" or "depth"
"""

from __future__ import annotations

import contextlib
import math
import sys
from datetime import datetime
from time import process_time
from typing import Any

from llmrun.engine.templates.frames import decoded, encoded, read_frame, write_frame
from llmrun.engine.templates.jinja import ConversationRefused, TemplateFailed, render


def main() -> None:
    """Answer requests until stdin closes."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, b"")  # tells the parent that this process is ready
    while (limits := read_frame(requests)) is not None:
        _limit(**decoded(limits))
        if (request := read_frame(requests)) is not None:
            write_frame(answers, _answer(request))


def _answer(data: bytes) -> bytes:
    try:
        request = decoded(data)
        return encoded(("abilities", _abilities(request)) if "probe" in request else ("text", _text(request)))
    except ConversationRefused as refusal:
        return encoded(("refuses", str(refusal)))
    except TemplateFailed as failure:
        return encoded(("failed", str(failure)))
    except MemoryError:
        return encoded(("over", "memory"))
    except RecursionError:
        return encoded(("over", "depth"))


def _text(request: dict[str, Any]) -> str:
    return render(request["source"], request["variables"], datetime.fromisoformat(request["now"]))


def _abilities(request: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from llmrun.engine.templates.probing import probe

    return asdict(probe(request["probe"]))


def _limit(cpu_s: float, memory: int) -> None:
    """Set operating-system limits, where available, because the parent checks only at intervals."""
    try:
        import resource
    except ImportError:  # this module does not exist on Windows
        return
    # The extra second lets the parent act first, because its error message is better.
    enough = math.ceil(process_time() + cpu_s) + 1
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, enough, resource.getrlimit(resource.RLIMIT_CPU)[1]),
        (resource.RLIMIT_FSIZE, 0, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # unsupported on macOS, or the limit is already lower
            resource.setrlimit(what, (soft, hard))
