"""Show a model's metadata without running it.

The output covers the architecture, tensors, tokenizer, sampling, chat template and licence in the model file, the
vision projector next to it, and the model's entry in the catalogue. For models not yet downloaded, only the header is
fetched; offline, only the catalogue's entry is shown. For presets, the settings are printed first.

Examples:
    llmrun show qwen3:4b
    llmrun show ./file.gguf --template
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.errors import ModelNotFound, NetworkError, UsageError
from llmrun.cli import preset_output
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings, required_model
from llmrun.cli.console.output import out
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.settings import preset_named

if TYPE_CHECKING:
    from llmrun.cli.vision_output import VisionFacts
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.hub.catalog import CatalogEntry, Wanted
    from llmrun.hub.names import Artifact
    from llmrun.options.presets import Preset

LISTING = {"heading": "Manage files", "place": 31}


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Model name (local or on the Hub) or .gguf file.", autocompletion=options.models
        ),
    ] = None,
    same: options.SameAsModel = None,
    template: Annotated[bool, typer.Option("--template", help="Print only the chat template.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="Print all metadata keys.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    json_output: options.Json = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> int:
    settings = apply_settings({"quiet": quiet, "offline": offline})
    parts = [
        flag for flag, given in (("--template", template), ("--metadata", metadata), ("--tensors", tensors)) if given
    ]
    if len(parts) > 1:
        raise UsageError(f"{parts[0]}: cannot be combined with {parts[1]}")

    name = required_model(name, same, "llmrun show qwen3:4b")
    preset = preset_named(name)
    if preset is not None:
        name = preset.model
        if not parts and not json_output:
            _show_preset(preset)  # the preset is shown first because the model may not be reachable
        if is_endpoint(name) and not parts:
            if json_output:
                out.json({"preset": preset_output.preset_as_json(preset)})
            return 0
    try:
        file, entry, called, offered = _opened(name, offline=settings.offline)
    except NetworkError as error:
        if parts or not _show_entry(name, error, preset, as_json=json_output):
            raise
        return 0
    with file:
        from llmrun.cli.vision_output import remote_vision_facts, vision_facts

        vision = None
        if not parts:
            vision = vision_facts(file, settings) if offered is None else remote_vision_facts(offered, file, settings)
        _show(file, called, entry, parts[0] if parts else "", preset, vision, as_json=json_output)
    return 0


def _opened(name: str, *, offline: bool) -> tuple[GGUFFile, CatalogEntry | None, str, Artifact | None]:
    """Return a model's header, catalogue entry and name, and what the Hub offers if it is not on this machine.

    For a model not yet downloaded, only the header is fetched. This function may raise any LlmrunError from the hub or
    the reader.
    """
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.hub.resolve.model_file import LocalPath, existing, understand
    from llmrun.hub.upkeep.inventory import models, select

    meant = understand(name)
    if isinstance(meant, LocalPath):
        return open_gguf(existing(meant)), None, meant.name or str(meant.path), None
    try:
        model = select(name, models())
    except ModelNotFound:
        file, offered = _fetched_header(meant, offline)
        return file, meant.entry, meant.name, offered
    return open_gguf(model.path), meant.entry, model.name, None


def _show_entry(name: str, error: NetworkError, preset: Preset | None, *, as_json: bool) -> bool:
    """Show what the catalogue knows about a model whose header cannot be fetched. Return False if it knows nothing."""
    from llmrun.cli import show_output
    from llmrun.hub.resolve.model_file import LocalPath, understand

    meant = understand(name)
    if isinstance(meant, LocalPath) or meant.entry is None:
        return False
    out.clear_progress()
    out.note(f"{error}; showing the catalogue's entry")
    if as_json:
        told = None if preset is None else preset_output.preset_as_json(preset)
        out.json({**show_output.entry_as_json(meant.entry, meant.name), "preset": told})
    else:
        show_output.show_entry(meant.entry, meant.name)
    return True


def _fetched_header(wanted: Wanted, offline: bool) -> tuple[GGUFFile, Artifact]:
    from llmrun.cli.console.progress import HubReporter
    from llmrun.hub.remote.model_headers import read_header
    from llmrun.hub.resolve.model_file import refuse_if_offline
    from llmrun.hub.resolve.offers import readable_in_parts

    refuse_if_offline(wanted, offline)
    out.progress(f"{wanted.name}: reading the header")
    offered = readable_in_parts(wanted, HubReporter())
    file = read_header(offered)
    out.clear_progress()
    return file, offered


def _show(
    file: GGUFFile,
    name: str,
    entry: CatalogEntry | None,
    part: str,
    preset: Preset | None,
    vision: VisionFacts | None,
    *,
    as_json: bool,
) -> None:
    """Print the overview of a header, or only the part that a flag such as "--template" selects."""
    from llmrun.cli import show_output

    match part:
        case "--template":
            _show_template(file, name)
        case "--metadata" if as_json:
            out.json(show_output.metadata_as_json(file))
        case "--metadata":
            out.lines(show_output.metadata_lines(file))
        case "--tensors" if as_json:
            out.json({"tensors": show_output.tensors_as_json(file)})
        case "--tensors":
            out.lines(show_output.tensor_lines(file))
        case _ if as_json:
            told = None if preset is None else preset_output.preset_as_json(preset)
            out.json({**show_output.as_json(file, name, entry, vision), "preset": told})
        case _:
            show_output.show_all(file, name, entry, vision)


def _show_preset(preset: Preset) -> None:
    from llmrun.cli import show_output

    show_output.show_section(f"Preset {preset.name}", [*preset_output.preset_fields(preset)])


def _show_template(file: GGUFFile, name: str) -> None:
    from llmrun.cli.show_output import TEMPLATE

    text = file.string(TEMPLATE, "")
    if not text:
        raise ModelNotFound(f"{name}: the file contains no chat template")
    out.answer(text)
    out.end_answer()
