"""List the models on this machine, and your presets.

The list includes models downloaded by llmrun, by other Hugging Face tools, by Ollama and by LM Studio. All models are
used in place, without a copy. The names of models work with -m, show, rm and verify. Models with a vision projector
(mmproj), which read images, are marked with "vision".

Examples:
    llmrun list
    llmrun list --json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.base.amounts import counted, format_age, format_bytes, format_tokens
from llmrun.base.errors import UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import room, shortened, visible_line
from llmrun.options.settings import load_presets

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.formats.gguf.glance import Glance
    from llmrun.hub.local.own_models import OwnModel
    from llmrun.hub.upkeep.inventory import Model
    from llmrun.hub.upkeep.removal import UnfinishedDownload
    from llmrun.options.presets import Preset

LISTING = {"heading": "Manage files", "place": 30, "aliases": ("ls",)}
_HEADER = ("NAME", "SIZE", "QUANT", "ARCHITECTURE", "CONTEXT", "LAST USED")
_PRESETS = ("PRESET", "MODEL", "SETTINGS")
_RIGHT = ("SIZE", "CONTEXT")
_DROPPABLE = (("CONTEXT",), ("QUANT",), ("LAST USED",))  # columns to drop on narrow terminals; most names include QUANT


def command(json_output: options.Json = False, quiet: options.Quiet = False) -> int:
    apply_settings({"quiet": quiet})

    from llmrun.cli import preset_output
    from llmrun.hub.local.own_models import own_models
    from llmrun.hub.local.projectors import projectors_of
    from llmrun.hub.upkeep import inventory, removal

    presets = _presets()
    found = inventory.models()
    described = [_Described(model, *inventory.facts_of(model), projectors_of(model.path)) for model in found]
    begun, broken = removal.partials(), [own for own in own_models() if own.missing]
    total = inventory.total_size([path for each in described for path in (*each.model.files, *each.projectors)])
    if json_output:
        out.json(
            {
                "models": [_as_json(each) for each in described],
                "presets": [preset_output.preset_as_json(preset) for preset in presets],
                "incomplete": [{"name": each.name, "bytes": each.done, "total_bytes": each.total} for each in begun],
                "broken": [{"name": each.name, "target": each.target} for each in broken],
                "total_bytes": total + sum(each.done for each in begun),
            }
        )
        return 0
    if not found and not begun and not broken:
        out.lines(["No models yet. `llmrun chat` downloads and starts a small model (98 MB);"])
        out.lines(["`llmrun pull NAME` downloads any other model, and `llmrun import FILE` adds a file that you have."])
    else:
        _show(described, total)
        out.lines(_begun(each) for each in begun)
        out.lines(_broken(each) for each in broken)
        _tell_of_old([model for model in found if not model.current])
    _show_presets(presets)
    return 0


class _Described(NamedTuple):
    """A model, a few fields of its header, the problem of reading the header, and the model's projectors."""

    model: Model
    facts: Glance
    problem: str
    projectors: Sequence[Path]


def _presets() -> list[Preset]:
    """Return the user's presets. If a preset is invalid, print a note, so that models can still be listed."""
    try:
        return [*load_presets().values()]
    except UsageError as error:
        out.note(f"{error}; presets are not listed" + (f" ({error.hint})" if error.hint else ""))
        return []


def _show_presets(presets: Sequence[Preset]) -> None:
    if not presets:
        return
    from llmrun.cli import preset_output
    from llmrun.cli.console.output import aligned

    rows = [(preset.name, visible_line(preset.model), preset_output.preset_summary(preset)) for preset in presets]
    lines = aligned([_PRESETS, *rows])
    first, *rest = [shortened(line, room(sys.stdout)) for line in lines]
    out.lines(["", first], dim=True)
    out.lines(rest)


def _show(described: list[_Described], total: int) -> None:
    from llmrun.cli.console.output import narrowed

    if described:
        now = time.time()
        rows = narrowed(_HEADER, [_row(each, now) for each in described], _RIGHT, _DROPPABLE)
        out.lines(rows[:1], dim=True)
        out.lines(rows[1:])
        out.lines([f"{counted(len(described), 'model')}, {format_bytes(total)}"], dim=True)


def _tell_of_old(old: Sequence[Model]) -> None:
    if old:
        has = "has" if len(old) == 1 else "have"
        out.note(f"{counted(len(old), 'model')} {has} a newer revision; `llmrun prune` removes the old files")


def _row(described: _Described, now: float) -> tuple[str, ...]:
    model, facts, problem, projectors = described
    return (
        model.name,
        format_bytes(model.size),
        facts.quantization,
        "damaged" if problem else f"{facts.architecture}, vision" if projectors else facts.architecture,
        format_tokens(facts.context),
        format_age(model.used, now) if model.used else "never",
    )


def _begun(partial: UnfinishedDownload) -> str:
    done = format_bytes(partial.done)
    if partial.total:
        done = f"{partial.done / partial.total:.0%} of {format_bytes(partial.total)}"
    return f"{partial.name}: {done} downloaded; pull the model again to resume"


def _broken(own: OwnModel) -> str:
    return visible_line(
        f"{own.name}: a link to {own.target}, which does not exist; `llmrun rm {own.name}` removes the link"
    )


def _as_json(described: _Described) -> dict[str, Any]:
    model, facts, problem, projectors = described
    record = model.record
    return {
        "name": model.name,
        "holder": model.holder,
        "files": [str(path) for path in model.files],
        "bytes": model.size,
        "quantization": facts.quantization,
        "architecture": facts.architecture,
        "context": facts.context,
        "projectors": [str(path) for path in projectors],
        "repository": model.repository,
        "commit": model.commits[0] if model.commits else "",
        "superseded": not model.current,
        "fetched": record.fetched if record else 0.0,
        "used": model.used,
        "problem": problem,
    }
