"""Unload models that stay loaded between runs.

Without MODEL, the command unloads the only loaded model. The command returns when the memory is free. To unload models
that are generating an answer, use --force. The command that waits for the answer then opens the model itself.

Examples:
    llmrun stop
    llmrun stop qwen3:4b
    llmrun stop --all --force
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.options.settings import model_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.serving.background.control import RunningEngine

LISTING = {"heading": "Run models", "place": 104}


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Model or preset, as in llmrun ps or -m.", autocompletion=options.models_running
        ),
    ] = None,
    all_models: Annotated[bool, typer.Option("--all", help="Unload all models.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also unload models that are generating.")] = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})
    if model is not None and all_models:
        raise UsageError("--all: cannot be combined with MODEL")

    from llmrun.serving.background.control import running, stop

    found = running()
    chosen = found if all_models else _chosen(model, found)
    told: list[dict[str, Any]] = []
    exit_code = 0
    for engine in chosen:
        title = visible_line(engine.title)
        try:
            stop(engine, force=force)
        except LlmrunError as error:
            exit_code = exit_code or error.exit_code
            told.append({**engine.as_json(), "stopped": False, "error": str(error)})
            out.error(str(error), error.hint)
            continue
        told.append({**engine.as_json(), "stopped": True})
        if not json_output:
            out.lines([f"{title}: unloaded"])
    if json_output:
        out.json({"engines": told})
    elif not found:
        out.lines(["No model is loaded."])
    return exit_code


def _chosen(model: str | None, found: Sequence[RunningEngine]) -> Sequence[RunningEngine]:
    """Return the engines to end. Raises LlmrunError if no engine matches, and UsageError if several could be meant."""
    names = ", ".join(sorted(visible_line(engine.title) for engine in found))
    if model is None and len(found) > 1:
        raise UsageError(f"several models are loaded: {names}", hint="name one of them, or use --all")
    wanted = () if model is None else (model, model_named(model))
    chosen = [engine for engine in found if model is None or any(map(engine.is_named, wanted))]
    if not chosen:
        loaded = f"loaded: {names}" if found else "no model is loaded"
        raise LlmrunError(loaded if model is None else f"{visible_line(model)}: not loaded; {loaded}")
    return chosen
