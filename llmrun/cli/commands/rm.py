"""Remove models from this machine.

`rm` does not ask for confirmation. Models in use and files that another revision or name needs are kept. For a linked
file (see `llmrun import`), only the link is removed.

Examples:
    llmrun rm qwen3:4b hf:org/repo:Q8_0
    llmrun rm --dry-run qwen3:4b
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import LlmrunError, ModelNotFound, UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out
from llmrun.options.settings import preset_named

if TYPE_CHECKING:
    from llmrun.hub.upkeep.inventory import Model
    from llmrun.hub.upkeep.removal import Removal, UnfinishedDownload

LISTING = {"heading": "Manage files", "place": 33, "aliases": ("remove",)}


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Model names as shown by llmrun list.", autocompletion=options.models_here
        ),
    ],
    dry_run: options.DryRun = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})

    from llmrun.hub.upkeep import removal
    from llmrun.hub.upkeep.inventory import models
    from llmrun.hub.upkeep.removal import partials

    found, begun = models(), partials()
    told: list[dict[str, Any]] = []
    exit_code = 0
    done: set[str] = set()  # several names may refer to the same model
    for name in names:
        try:
            planned = _planned(name, found, begun)
            if planned.name in done:
                continue
            done.add(planned.name)
            freed = planned.freed if dry_run else removal.remove(planned)
        except LlmrunError as error:
            exit_code = exit_code or error.exit_code
            told.append({"name": name, "error": str(error)})
            out.error(str(error), error.hint)
            continue
        files = [str(path) for path in (*planned.links, *planned.blobs)]
        told.append({"name": planned.name, "freed_bytes": freed, "files": files})
        for note in planned.notes:
            out.note(note)
        if not json_output:
            verb = "would be removed" if dry_run else "removed"
            out.lines([f"{planned.name}: {verb}, freeing {format_bytes(freed)}"])
    if json_output:
        out.json({"dry_run": dry_run, "models": told, "freed_bytes": sum(each.get("freed_bytes", 0) for each in told)})
    return exit_code


def _planned(name: str, found: list[Model], begun: list[UnfinishedDownload]) -> Removal:
    from llmrun.hub.local.own_models import find_own
    from llmrun.hub.upkeep import inventory, removal

    preset = preset_named(name)
    if preset is not None and preset.model.lower() != name.lower():
        raise UsageError(
            f"model: {name!r}: a preset of {preset.model}, not a model",
            hint=f"`llmrun preset rm {preset.name}` removes the preset; to remove the model, name {preset.model}",
        )
    partial = next((each for each in begun if each.name.lower() == name.lower()), None)
    try:
        return removal.removal_of(inventory.select(name, found))
    except ModelNotFound:
        if (own := find_own(name)) is not None and own.missing:
            return removal.removal_of_own(own.name, own.files)
        if partial is None:
            raise
        return removal.removal_of_partial(partial)
