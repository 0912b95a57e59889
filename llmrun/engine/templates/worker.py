"""The process that runs chat templates: `main` answers requests on its standard streams until the first one closes.

An empty frame says that it is ready. A request is two frames: the limits, {"cpu_s", "memory"}, then {"probe": source}
or {"source", "variables", "now"}.
An answer is [kind, value]: "text" with what the template wrote, "abilities" with what probing it found, "refuses" (the
template does not take this conversation) or "failed" (it went wrong) with words, "over" with "memory" or "depth".
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
    """Answer until nobody asks any more."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, b"")  # ready
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
    """Have the system hold what the parent holds by looking, where it can: a look may come too late."""
    try:
        import resource
    except ImportError:  # Windows
        return
    enough = math.ceil(process_time() + cpu_s) + 1  # a second more: the parent gives the better reason
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, enough, resource.getrlimit(resource.RLIMIT_CPU)[1]),
        (resource.RLIMIT_FSIZE, 0, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # macOS, or a limit that is lower already
            resource.setrlimit(what, (soft, hard))
