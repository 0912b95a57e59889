"""Shows the models that suit this machine, for `llmrun fit` and `llmrun search`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmrun.base.amounts import format_bytes
from llmrun.base.machine.shell import words
from llmrun.cli.console.output import narrowed, out

if TYPE_CHECKING:
    from llmrun.backends.fitting import Resources
    from llmrun.hub.recommendation import Candidate, Recommended

_HEADS = ("", "COMMAND", "DOWNLOAD", "MEMORY", "TOK/S", " ")
_DROPPABLE = ((" ",), ("MEMORY",), ("DOWNLOAD",), ("TOK/S",))
ESTIMATES = "~ marks estimates from the catalogue"


def disturbance_words(disturbance: str) -> str:
    """Explain the mark "?" of speeds that were measured on a busy machine."""
    return f"? measured while {disturbance}; `llmrun fit` measures again when the machine is quiet"


def recommendations(resources: Resources) -> list[Recommended]:
    """Return the models that suit this machine, after measuring its memory bandwidth once."""
    from llmrun.hub.recommendation import recommended

    out.progress("measuring this machine (once)", at_once=True)
    found = recommended(resources)
    if resources.speeds is not None:
        resources.speeds.keep()
    out.clear_progress()
    return found


def show_recommendations(found: Sequence[Recommended], resources: Resources) -> None:
    """Print one line per model, with the command that runs it."""
    lines = narrowed(_HEADS, [_row(each, resources.disturbance) for each in found], _HEADS[2:5], _DROPPABLE)
    out.lines(lines[:1], dim=True)
    out.lines(lines[1:])
    if resources.disturbance:
        out.lines([disturbance_words(resources.disturbance)], dim=True)


def _row(each: Recommended, disturbance: str) -> tuple[str, ...]:
    from llmrun.backends.experience import RUNS
    from llmrun.hub.recommendation import is_estimate

    model, speed = each.model, ""
    if model.speed is not None:
        speed = f"{model.speed:.0f}"
        if is_estimate(model):
            speed = f"~{speed}{'?' if disturbance else ''}"
    facts = ["on the GPU"] if model.on_gpu else []
    facts += ["speed from your runs"] if model.origin == RUNS else []
    return (
        ", ".join(each.purposes),
        _command(model),
        "here" if model.is_here else _about(model.size, is_exact=model.is_exact),
        _about(model.needed, is_exact=model.is_here),
        speed,
        ", ".join(facts),
    )


def _about(size: int, *, is_exact: bool) -> str:
    return format_bytes(size) if is_exact else f"~{format_bytes(size)}"


def _command(model: Candidate) -> str:
    return words(["llmrun", "chat", model.name])


def recommendations_as_json(found: Sequence[Recommended], resources: Resources) -> list[dict[str, Any]]:
    """Return the fields of each model for --json."""
    from llmrun.hub.recommendation import is_estimate

    return [
        {
            "for": each.purposes,
            "name": each.model.name,
            "command": _command(each.model),
            "here": each.model.is_here,
            "file_bytes": each.model.size,
            "file_bytes_exact": each.model.is_exact,
            "download_bytes": 0 if each.model.is_here else each.model.size,
            "memory_needed": each.model.needed,
            "memory_exact": each.model.is_here,
            "on_gpu": each.model.on_gpu,
            "decode_per_second": each.model.speed,
            "decode_from": each.model.origin or None,
            "disturbance": (is_estimate(each.model) and resources.disturbance) or None,
        }
        for each in found
    ]
