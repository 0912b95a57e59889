"""List the models that stay loaded between runs.

A background engine holds each of these models. `generate` and `chat` start the engine on the second run of a model
within ten minutes. An engine ends by itself when nobody has used it for five minutes, or earlier if other programs need
its memory.

Examples:
    llmrun ps
    llmrun ps --json
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmrun.base.amounts import format_bytes, format_until
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import narrowed, out

if TYPE_CHECKING:
    from llmrun.serving.background.control import RunningEngine

LISTING = {"heading": "Run models", "place": 103}
_HEADER = ("MODEL", "STATE", "MEMORY", "UNTIL", "PID", "VERSION")
_DROPPABLE = (("VERSION",), ("PID",), ("MEMORY",))  # columns to drop on narrow terminals


def command(json_output: options.Json = False, quiet: options.Quiet = False) -> int:
    apply_settings({"quiet": quiet})

    from llmrun.serving.background.control import running

    found, now = running(), time.time()
    if json_output:
        out.json({"engines": [engine.as_json() for engine in found]})
    elif not found:
        out.lines(
            ["No model is loaded. `llmrun generate` and `llmrun chat` keep a model loaded from the second run on."]
        )
    else:
        rows = narrowed(_HEADER, [_row(engine, now) for engine in found], ("MEMORY", "PID"), _DROPPABLE)
        out.lines(rows[:1], dim=True)
        out.lines(rows[1:])
    return 0


def _row(engine: RunningEngine, now: float) -> tuple[str, ...]:
    state, pid = engine.state, str(engine.pid or "")
    if state is None:
        return engine.title, engine.activity, "", "", pid, ""
    until = "" if state.until is None else format_until(state.until, now)  # None while the engine answers
    return state.name, engine.activity, format_bytes(state.memory_bytes), until, pid, state.version
