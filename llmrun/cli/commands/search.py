"""List or search the models that llmrun knows by name.

If you give words, only models with all the words in their name, description or licence are listed. Sizes are for the
default quantization; `llmrun fit NAME` shows all quantizations. FITS compares the estimated memory need with the
memory that is free now. The search works offline. On a terminal, the full list ends with the models that suit this
machine, like `llmrun fit`. With --hub, the command searches the Hugging Face Hub for GGUF models instead.

Examples:
    llmrun search
    llmrun search qwen3 apache
    llmrun search --hub -n 10 mistral
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from llmrun.base.amounts import counted, format_bytes, format_tokens, format_weights
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal

if TYPE_CHECKING:
    from llmrun.hub.remote.huggingface import HubModel
    from llmrun.hub.search import FoundModel

LISTING = {"heading": "Find and fit models", "place": 21}
_HEADER = ("NAME", "PARAMS", "DOWNLOAD", "FITS", "HERE", "CONTEXT", "LICENCE")
_RIGHT = ("PARAMS", "DOWNLOAD", "CONTEXT", "DOWNLOADS", "LIKES")
_DROPPABLE = (("LICENCE",), ("CONTEXT",), ("PARAMS",), ("HERE",), ("DOWNLOAD",))  # columns to drop on narrow terminals
_UNKNOWN = "?"
_HUB_HEADER = ("NAME", "DOWNLOADS", "LIKES", "LICENCE")
_HUB_DROPPABLE = (("LICENCE",), ("LIKES",), ("DOWNLOADS",))
_MOST_FROM_HUB = 20


def command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Words that must all match.  [default: list all]")
    ] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Search the Hugging Face Hub for GGUF models.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--limit",
            metavar="N",
            min=1,
            max=1000,
            help="Show at most N models.  [default: all, or 20 with --hub]",
        ),
    ] = None,
    json_output: options.Json = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> int:
    settings = apply_settings({"quiet": quiet, "offline": offline})
    if hub:
        _search_hub(words or (), limit or _MOST_FROM_HUB, offline=settings.offline, as_json=json_output)
    else:
        _search_catalogue(words or (), limit, as_json=json_output)
    return 0


def _search_catalogue(words: Sequence[str], limit: int | None, *, as_json: bool) -> None:
    from llmrun.base.machine.memory import free_memory
    from llmrun.hub.search import find_models

    found = find_models(words)
    shown, memory = found[:limit], free_memory()
    if as_json:
        out.json({"memory_free": memory, "models": [_as_json(model, memory) for model in shown]})
        return
    _show(_HEADER, [_row(model, memory) for model in shown], _DROPPABLE)
    total = counted(len(found), "model")
    facts = [total if len(shown) == len(found) else f"{len(shown):,} of {total}"]
    if memory is not None:
        facts.append(f"{format_bytes(memory)} of memory free")
    out.fields([*facts, "llmrun pull NAME", "llmrun fit NAME"])
    if not words and not out.quiet and is_terminal(sys.stdout):
        _recommend()


def _recommend() -> None:
    """Print the models that suit this machine."""
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.fitting import Resources
    from llmrun.base.errors import LlmrunError
    from llmrun.base.machine.cpu_count import default_threads
    from llmrun.cli.recommendation_output import recommendations, show_recommendations

    threads = default_threads()
    try:
        resources = Resources.of_this_machine(threads=threads, speeds=Speeds.of_this_machine(threads))
        found = recommendations(resources)
    except LlmrunError as error:  # the speed of this machine cannot be measured, but the search has succeeded
        out.note(f"no models recommended: {error}")
        return
    if found:
        out.lines(["", "For this machine (llmrun fit)"], dim=True)
        show_recommendations(found, resources)


def _row(model: FoundModel, memory: int | None) -> tuple[str, ...]:
    entry = model.entry
    size = format_bytes(model.size) if model.size is not None else _UNKNOWN
    return (
        model.name,
        format_weights(entry.parameters) if entry.parameters else "",
        size if model.is_exact or model.size is None else f"~{size}",
        model.fits(memory) or _UNKNOWN,
        " ".join(model.here),
        format_tokens(entry.context or 0),
        entry.license,
    )


def _as_json(model: FoundModel, memory: int | None) -> dict[str, Any]:
    entry = model.entry
    return {
        "name": model.name,
        "family": entry.family,
        "description": entry.description,
        "license": entry.license,
        "aliases": list(entry.aliases),
        "parameters": entry.parameters,
        "context": entry.context,
        "quantization": entry.default,
        "quantizations": list(entry.quants),
        "bytes": model.size,
        "bytes_exact": model.is_exact,
        "memory_needed_estimate": model.needed,
        "fits": model.fits(memory) or None,
        "here": list(model.here),
    }


def _search_hub(words: Sequence[str], limit: int, *, offline: bool, as_json: bool) -> None:
    from llmrun.base.errors import ModelNotFound, NetworkError
    from llmrun.hub.remote.huggingface import search_hub
    from llmrun.hub.resolve.model_file import is_offline

    if is_offline(offline):
        raise NetworkError(
            "search --hub: not available offline", hint="run without --offline, LLMRUN_OFFLINE and HF_HUB_OFFLINE"
        )
    out.progress("searching the Hugging Face Hub")
    found = search_hub(" ".join(words), limit)
    out.clear_progress()
    if as_json:
        out.json({"models": [{"name": model.name, **structs.asdict(model)} for model in found]})
        return
    if not found:
        raise ModelNotFound(f"search --hub: no GGUF model on the Hub matches {' '.join(words)[:200]!r}")
    rows = [(model.name, f"{model.downloads:,}", f"{model.likes:,}", _licence_of(model)) for model in found]
    _show(_HUB_HEADER, rows, _HUB_DROPPABLE)
    more = f", the most downloaded; -n {2 * limit} shows more" if len(found) == limit else ""
    out.fields([f"{len(found):,} {'repository' if len(found) == 1 else 'repositories'}{more}", "llmrun fit NAME"])


def _licence_of(model: HubModel) -> str:
    return ", ".join(filter(None, (model.license, "gated" if model.gated else "")))


def _show(header: Sequence[str], rows: Sequence[Sequence[str]], droppable: Sequence[Sequence[str]]) -> None:
    from llmrun.cli.console.output import narrowed

    lines = narrowed(header, rows, _RIGHT, droppable)
    out.lines(lines[:1], dim=True)
    out.lines(lines[1:])
