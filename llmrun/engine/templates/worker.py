"""The process that runs chat templates: `main` answers requests on stdin and stdout until stdin closes.

An empty frame says that it is ready. A request is two frames: the limits, {"cpu_s", "memory"}, then {"probe": source}
or {"source", "variables", "now"}. An answer is [kind, value]:

"text"       what the template wrote
"abilities"  what probing it found
"refuses"    the template's reason for not taking this conversation
"failed"     what went wrong in the template
"over"       the limit that it broke: "memory" or "depth"
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
    """Let the system enforce the parent's limits too, where it can: the parent may look too late."""
    try:
        import resource
    except ImportError:  # Windows
        return
    enough = math.ceil(process_time() + cpu_s) + 1  # a second more, because the parent's error message is better
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, enough, resource.getrlimit(resource.RLIMIT_CPU)[1]),
        (resource.RLIMIT_FSIZE, 0, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # macOS, or the limit is already lower
            resource.setrlimit(what, (soft, hard))
