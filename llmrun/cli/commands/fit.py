"""Check whether models fit this machine and how fast they run.

For models not yet downloaded, only the header is fetched. If a name does not specify a quantization, all quantizations
are listed, with the best choice marked. Memory is the sum of weights, KV cache and scratch space. Speeds are predicted
from a measurement of this machine, which is made only once and takes a few seconds. Encoders generate no text, so their
speed is the speed of reading text.

Examples:
    llmrun fit qwen3:8b
    llmrun fit hf:org/repo -c 32768 --kv-type q8_0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.errors import DoesNotFit, LlmrunError, NetworkError, UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import all_models, apply_settings
from llmrun.cli.console.output import hanging, out
from llmrun.cli.console.terminal import room
from llmrun.cli.messages import message_for
from llmrun.options.settings import model_named

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.backends.fitting import Fit
    from llmrun.cli.console.progress import HubReporter
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.hub.catalog import Wanted
    from llmrun.hub.names import Artifact
    from llmrun.options.settings import Settings

LISTING = {"heading": "Find and fit models", "place": 20}
_NO_NETWORK = "check the connection; `llmrun list` shows the models on this machine"
_NUMBERS = ("FILE", "MEMORY", "WEIGHTS", "KV", "TEXT", "SCRATCH", "ON GPU", "TTFT", "PER TEXT", "TOK/S")
_DROPPABLE = (("WEIGHTS", "KV", "TEXT", "SCRATCH"), ("FILE", "QUANT"))  # columns to drop on narrow terminals


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Model names, hf:OWNER/NAME[:QUANT], URLs or .gguf files.",
            autocompletion=options.models,
        ),
    ] = None,
    same: options.SameAsModels = None,
    ctx_size: Annotated[
        int | None,
        typer.Option("-c", "--ctx-size", metavar="N", help="Context size in tokens; 0: as trained.  [default: 4096]"),
    ] = None,
    prompt: Annotated[
        int, typer.Option("-p", "--prompt", metavar="N", help="Prompt length in tokens for estimating TTFT.", min=1)
    ] = 512,
    kv_type: options.KVType = None,
    threads: options.Threads = None,
    rpc: options.Rpc = None,
    rpc_anyway: options.RpcAnyway = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure the speed of this machine again.")] = False,
    json_output: options.Json = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> int:
    models = list(all_models(models, same))
    if not models:
        raise UsageError("MODEL is missing", hint="for example: llmrun fit qwen3:8b")
    given = {"offline": offline, "quiet": quiet, "ctx_size": ctx_size, "kv_type": kv_type, "threads": threads}
    given |= {"rpc": rpc, "rpc_anyway": rpc_anyway}
    settings = apply_settings(given)
    asked = _FitFlags(settings, prompt, remeasure)
    shown, exit_code = [], 0
    for name in models:
        try:
            shown.append(_shown(name, asked, json_output))
        except LlmrunError as error:
            if len(models) == 1:
                raise
            message = message_for(error)
            out.error(f"{name}: {message.sentence}", message.hint)
            shown.append({"name": name, "error": message.sentence})
            exit_code = exit_code or message.exit_code
    if json_output:
        here = asked.resources
        machine = {"memory_free": here.memory, "gpus": list(here.gpus), "threads": here.threads}
        out.json({"machine": machine, "models": shown})
    fitting = (any(row["fits"] for row in model.get("quantizations", [{"fits": True}])) for model in shown)
    return exit_code or (0 if all(fitting) else DoesNotFit.exit_code)


class _FitFlags:
    """The options that apply to every model. The machine's speed is measured on first use."""

    def __init__(self, settings: Settings, prompt: int, remeasure: bool) -> None:
        from llmrun.backends.base import OpenOptions
        from llmrun.backends.cpu.speeds.machine import Speeds
        from llmrun.backends.fitting import Resources
        from llmrun.base.machine.cpu_count import default_threads

        self.settings, self.prompt = settings, prompt
        threads = settings.threads or default_threads()
        self.speeds = Speeds.of_this_machine(threads, afresh=remeasure)
        options = OpenOptions(rpc=settings.rpc_servers, rpc_anyway=settings.rpc_anyway)
        self.resources = Resources.of_this_machine(threads=threads, speeds=self.speeds, options=options)

    def fit_of(self, file: GGUFFile) -> Fit:
        from llmrun.backends.fitting import fit_of

        context, kv_type = self.settings.ctx_size, self.settings.kv_type
        return fit_of(file, self.resources, context=context, kv_type=kv_type, prompt=self.prompt)


class _Named(NamedTuple):
    """A quantization, with its display name and Fit."""

    name: str
    quantization: str
    fit: Fit


def _shown(name: str, asked: _FitFlags, as_json: bool) -> dict[str, Any]:
    """Show one model or all of its quantizations. Return the model's entry for --json."""
    from llmrun.backends.fitting import best_of
    from llmrun.hub.names import quantization_of

    named: list[_Named] = []
    for called, file_name, file in _headers(name, asked.settings):
        out.progress(f"{called}: measuring this machine (once)")
        with file:
            one = asked.fit_of(file)
        named.append(_Named(called, quantization_of(file_name) or one.file_type, one))
    asked.speeds.keep()
    out.clear_progress()
    named.sort(key=lambda row: row.fit.file_bytes)
    best = best_of([row.fit for row in named])
    if not as_json:
        _show_table(named, best, asked)
    return {"name": name, "quantizations": [_as_json(row, best == number) for number, row in enumerate(named)]}


def _headers(name: str, settings: Settings) -> Iterator[tuple[str, str, GGUFFile]]:
    """Yield the display name, file name and header of each quantization that `name` refers to.

    `name` may be a file, a local model or a name that covers several quantizations. No request is made for local
    models. If one of several headers cannot be read, a note is printed. This function may raise any LlmrunError from
    the hub or the reader.
    """
    from llmrun.cli.console.progress import HubReporter
    from llmrun.formats.gguf.metadata import check_is_model
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.hub.resolve.model_file import LocalPath, existing, is_offline, refuse_if_offline, understand
    from llmrun.hub.resolve.offers import here, leaves_open

    meant = understand(model_named(name))
    if isinstance(meant, LocalPath):
        file = open_gguf(existing(meant))
        check_is_model(file)
        yield meant.path.name, meant.path.name, file
        return
    held = here(meant)
    if held and (not leaves_open(meant) or _are_all(held, meant)):
        yield from _held(held)
        return
    if held and is_offline(settings.offline):
        out.note(f"{meant.name}: offline: showing local models only")
        yield from _held(held)
        return
    refuse_if_offline(meant, settings.offline)
    try:
        yield from _offered(meant, dict(held), HubReporter())
    except NetworkError as error:
        if not held:
            raise type(error)(_naming(meant, error), hint=_hint(meant, error)) from error
        out.note(f"{_naming(meant, error)}; showing local models only")
        yield from _held(held)


def _are_all(held: Sequence[tuple[str, Path]], meant: Wanted) -> bool:
    """Return whether `held` contains all the quantizations of a catalogue entry.

    Return False for a repository that is not in the catalogue, because it may have more quantizations than `held`.
    """
    return meant.entry is not None and meant.name == meant.entry.name and len(held) == len(meant.entry.quants)


def _naming(meant: Wanted, error: LlmrunError) -> str:
    from llmrun.hub.remote.network_errors import Unreachable

    if meant.name in str(error):
        return str(error)
    return f"{meant.name}: {'the Hub does not answer: ' if isinstance(error, Unreachable) else ''}{error}"


def _hint(meant: Wanted, error: LlmrunError) -> str:
    """Return the error's hint. For catalogue models with a known size, add the command that prints an estimate."""
    hint, entry = error.hint or _NO_NETWORK, meant.entry
    if entry is None or entry.estimated_size is None:
        return hint
    return f"{hint}; `llmrun search {entry.name}` estimates from the catalogue whether the model fits"


def _held(held: Sequence[tuple[str, Path]]) -> Iterator[tuple[str, str, GGUFFile]]:
    from llmrun.formats.gguf.reader import open_gguf

    for name, path in held:
        yield name, path.name, open_gguf(path)


def _local_copy(artifact: Artifact, held: dict[str, Path]) -> GGUFFile | None:
    """Open the local copy of an artifact, matched by name and size. Return None if the copy is missing or damaged."""
    from llmrun.formats.gguf.reader import open_gguf

    try:
        file = open_gguf(held[artifact.name]) if artifact.name in held else None
    except LlmrunError:
        return None
    if file is None:
        return None
    if file.file_bytes == artifact.size:
        return file
    file.close()
    return None


def _offered(meant: Wanted, held: dict[str, Path], reporter: HubReporter) -> Iterator[tuple[str, str, GGUFFile]]:
    """Yield all available quantizations. Read headers from local files where possible, and fetch the others."""
    from llmrun.hub.remote.model_headers import read_headers
    from llmrun.hub.resolve.offers import offers

    out.progress(f"{meant.name}: listing the quantizations")
    artifacts = offers(meant, reporter)
    local = {one.name: copy for one in artifacts if (copy := _local_copy(one, held)) is not None}
    missing = [one for one in artifacts if one.name not in local]
    read = read_headers(missing, reporter, next(iter(local.values()), None))
    unread = [error for error in read if isinstance(error, LlmrunError)]
    if unread and len(unread) == len(artifacts):
        raise unread[0]
    found: dict[str, GGUFFile | LlmrunError] = {one.name: file for one, file in zip(missing, read, strict=True)}
    for artifact in artifacts:
        file = local[artifact.name] if artifact.name in local else found[artifact.name]
        if isinstance(file, LlmrunError):
            out.note(f"{artifact.name}: {file}")
        else:
            yield artifact.name, artifact.files[0].path, file


# --- the table --------------------------------------------------------------------------------------------------------


def _show_table(named: Sequence[_Named], best: int | None, asked: _FitFlags) -> None:
    from llmrun.cli.console.output import narrowed

    heading = _heading(asked, named[0].fit)
    out.lines([row for line in heading for row in hanging(line, room(sys.stdout))], dim=True)
    rows = [_cells(row, best == number and len(named) > 1) for number, row in enumerate(named)]
    heads = [head for head in rows[0] if head != "ON GPU" or any(row.fit.layers for row in named)]
    lines = narrowed(heads, [[row[head] for head in heads] for row in rows], _NUMBERS, _DROPPABLE)
    out.lines(lines[:1], dim=True)
    out.lines(lines[1:])


def _cells(row: _Named, is_best: bool) -> dict[str, str]:
    """Return the cells by column heading. The first and the last column have empty headings."""
    one, speed = row.fit, row.fit.forecast
    per_second = (speed.decode_per_second or speed.prefill_per_second) if speed else None
    return {
        "": "*" if is_best else "",
        "MODEL": row.name,
        "QUANT": row.quantization,
        "FILE": format_bytes(one.file_bytes),
        "MEMORY": format_bytes(one.needed),
        "WEIGHTS": format_bytes(one.footprint.weights),
        "KV" if one.generates else "TEXT": format_bytes(one.footprint.cache.of(one.context)),
        "SCRATCH": format_bytes(one.footprint.scratch + one.footprint.vocabulary),
        "ON GPU": f"{one.gpu_layers} of {one.layers}",
        "TTFT" if one.generates else "PER TEXT": f"{speed.ttft_s:.2f} s" if speed else "",
        "TOK/S": f"{per_second:.0f}" if per_second else "",
        " ": _verdict(one, is_best),
    }


def _verdict(one: Fit, is_best: bool) -> str:
    from llmrun.backends.fitting import FLUENT
    from llmrun.backends.registry import backend_named

    if one.memory is not None and not one.in_memory:
        over = format_bytes(one.needed - one.memory)
        return f"slow, {over} of it read from disk" if one.fits else f"too big by {over}"
    words = "fits"
    if one.gpu_layers:
        words = "fits the GPU" if one.gpu_layers == one.layers else "fits, partly on the GPU"
    elif (entry := backend_named(one.backend)) is not None and entry.program:
        words = f"fits, {entry.program} runs it"
    if one.forecast is not None and (one.forecast.decode_per_second or FLUENT) < FLUENT:
        words += ", slow"
    return f"{words}: the best choice" if is_best else words


def _heading(asked: _FitFlags, one: Fit) -> list[str]:
    """Return the lines above the table, which show this machine's resources and the assumptions for the estimates."""
    found = asked.resources
    memory = f"{format_bytes(found.memory)} of memory free" if found.memory is not None else "free memory unknown"
    gpus = [f"{gpu['description']}: {format_bytes(gpu['free'])} free" for gpu in found.gpus]
    what, cache = ("prompt", f", a KV cache of {asked.settings.kv_type}") if one.generates else ("text", "")
    lines = [
        "here  " + ", ".join([memory, *gpus, counted(found.threads, "thread")]),
        f"for   {one.context:,} tokens of context (-c), a {what} of {asked.prompt:,} (-p){cache}",
    ]
    if one.trained_context and one.context > one.trained_context:
        lines.append(f"      the model was trained for {one.trained_context:,} tokens of context")
    return lines


# --- JSON -------------------------------------------------------------------------------------------------------------


def _as_json(row: _Named, is_best: bool) -> dict[str, Any]:
    one, speed = row.fit, row.fit.forecast
    return {
        "name": row.name,
        "architecture": one.architecture,
        "quantization": row.quantization,
        "file_bytes": one.file_bytes,
        "parameters": one.parameters,
        "backend": one.backend,
        "context_size": one.context,
        "trained_context": one.trained_context,
        "memory_needed": one.needed,
        "memory_of_weights": one.footprint.weights,
        "memory_mapped": one.footprint.mapped,
        "memory_of_kv_cache": one.footprint.cache.of(one.context),
        "memory_of_scratch": one.footprint.scratch + one.footprint.vocabulary,
        "peak_memory": one.footprint.total(one.context),
        "gpu_layers": one.gpu_layers,
        "layers": one.layers,
        "fits": one.fits,
        "in_memory": one.in_memory,
        "best": is_best,
        "ttft_s": speed.ttft_s if speed else None,
        "prefill_per_second": speed.prefill_per_second if speed else None,
        "decode_per_second": speed.decode_per_second if speed else None,
    }
