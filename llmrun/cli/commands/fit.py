"""Recommend models, or check whether models fit this machine.

Without a name, the command recommends up to three models of the catalogue for this machine: a fast one, a balanced one
and the best one. For models not yet downloaded, only the header is fetched. Offline, memory and speed are estimated
from the catalogue. If a name does not specify a quantization, all quantizations are listed, with the best choice
marked. Memory is the sum of weights, KV cache, scratch space and, for models that read images, the vision projector.
PHOTO is the time to encode an image of 1,024 x 768 pixels. Speeds are predicted from a measurement of this machine,
which is made only once and takes a few seconds, until real runs have shown the true speed. Encoders generate no text,
so their speed is the speed of reading text.

Examples:
    llmrun fit
    llmrun fit qwen3:8b
    llmrun fit hf:org/repo -c 32768 --kv-type q4_0
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from llmrun.base.amounts import counted, format_bytes, format_seconds_roughly
from llmrun.base.errors import DoesNotFit, LlmrunError, NetworkError, UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import all_models, apply_settings
from llmrun.cli.console.output import hanging, out
from llmrun.cli.console.terminal import room
from llmrun.cli.messages import message_for
from llmrun.options.settings import MMPROJ_OFF, model_named

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.backends.fitting import Fit, ProjectorHeader
    from llmrun.backends.registry import ImageCosts
    from llmrun.cli.console.progress import HubReporter
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.hub.catalog import CatalogEntry, Wanted
    from llmrun.hub.names import Artifact, Source
    from llmrun.hub.remote.repository import Listing
    from llmrun.options.settings import Settings

LISTING = {"heading": "Find and fit models", "place": 20}
_NO_NETWORK = "check the connection; `llmrun list` shows the models on this machine"
_NUMBERS = (
    "FILE",
    "MEMORY",
    "WEIGHTS",
    "KV",
    "TEXT",
    "SCRATCH",
    "VISION",
    "ON GPU",
    "PHOTO",
    "TTFT",
    "PER TEXT",
    "TOK/S",
)
_DROPPABLE = (("WEIGHTS", "KV", "TEXT", "SCRATCH", "VISION"), ("FILE", "QUANT"))  # columns to drop on narrow terminals


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Model names, hf:OWNER/NAME[:QUANT], URLs or .gguf files.",
            autocompletion=options.models,
        ),
    ] = None,
    same: options.SameAsModels = None,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c", "--ctx-size", metavar="N", help="Context size in tokens; 0 for the trained size.  [default: 4096]"
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            "-p", "--prompt", metavar="N", help="Prompt length in tokens for estimating TTFT.  [default: 512]", min=1
        ),
    ] = None,
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
    given = {"offline": offline, "quiet": quiet, "ctx_size": ctx_size, "kv_type": kv_type, "threads": threads}
    given |= {"rpc": rpc, "rpc_anyway": rpc_anyway}
    settings = apply_settings(given)
    if not models:
        _check_no_model({"--ctx-size": ctx_size, "--prompt": prompt, "--kv-type": kv_type})
        return _recommend(_FitFlags(settings, None, remeasure), json_output)
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
        out.json({"machine": _machine_as_json(asked), "models": shown})
    fitting = (any(row["fits"] for row in model.get("quantizations", [{"fits": True}])) for model in shown)
    return exit_code or (0 if all(fitting) else DoesNotFit.exit_code)


def _check_no_model(flags: Mapping[str, object]) -> None:
    """Raise UsageError for flags that concern the models that the user names."""
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(f"{flag}: needs the name of a model", hint="llmrun fit NAME")


def _recommend(asked: _FitFlags, as_json: bool) -> int:
    """Show the models that suit this machine, and return the exit code."""
    from llmrun.cli.recommendation_output import (
        ESTIMATES,
        recommendations,
        recommendations_as_json,
        show_recommendations,
    )

    found = recommendations(asked.resources)
    if not found:
        raise DoesNotFit("no recommended model fits the free memory", hint="close other programs, and try again")
    if as_json:
        shown = recommendations_as_json(found, asked.resources)
        out.json({"machine": _machine_as_json(asked), "recommended": shown})
        return 0
    out.lines([_here(asked)], dim=True)
    show_recommendations(found, asked.resources)
    out.fields([ESTIMATES, "llmrun fit NAME", "llmrun search"])
    return 0


class _FitFlags:
    """The options that apply to every model. The machine's speed is measured on first use."""

    def __init__(self, settings: Settings, prompt: int | None, remeasure: bool) -> None:
        from llmrun.backends.base import OpenOptions
        from llmrun.backends.cpu.speeds.machine import Speeds
        from llmrun.backends.fitting import DEFAULT_PROMPT, Resources
        from llmrun.base.machine.cpu_count import default_threads
        from llmrun.cli.answers.room import idle_memory

        self.settings, self.prompt = settings, prompt or DEFAULT_PROMPT
        threads = settings.threads or default_threads()
        self.speeds = Speeds.of_this_machine(threads, afresh=remeasure)
        options = OpenOptions(rpc=settings.rpc_servers, rpc_anyway=settings.rpc_anyway)
        found = Resources.of_this_machine(threads=threads, speeds=self.speeds, options=options)
        memory = None if found.memory is None else found.memory + idle_memory()
        self.resources = replace(found, memory=memory)

    def fit_of(self, file: GGUFFile, projector: ProjectorHeader | ImageCosts | None) -> Fit:
        from llmrun.backends.fitting import fit_of

        context, kv_type = self.settings.ctx_size, self.settings.kv_type
        return fit_of(file, self.resources, context=context, kv_type=kv_type, prompt=self.prompt, projector=projector)

    def estimate_of(self, quant: _CatalogQuant) -> Fit | None:
        from llmrun.hub.recommendation import as_fit, from_catalogue

        found = from_catalogue(quant.entry, quant.quantization, self.resources)
        return as_fit(found, self.resources) if found is not None else None


class _CatalogQuant(NamedTuple):
    """A quantization whose header is not available, so that its Fit is estimated from the catalogue."""

    entry: CatalogEntry
    quantization: str


# The display name of a quantization, its header, and its projector.
_Header = tuple[str, "GGUFFile | _CatalogQuant", "ProjectorHeader | ImageCosts | None"]


class _Named(NamedTuple):
    """A quantization, with its display name and Fit."""

    name: str
    quantization: str
    fit: Fit
    is_estimate: bool = False


def _shown(name: str, asked: _FitFlags, as_json: bool) -> dict[str, Any]:
    """Show one model or all of its quantizations. Return the model's entry for --json."""
    from llmrun.backends.fitting import best_of

    named: list[_Named] = []
    for called, file, projector in _headers(name, asked.settings):
        out.progress(f"{called}: measuring this machine (once)", at_once=True)
        if isinstance(file, _CatalogQuant):
            if (guess := asked.estimate_of(file)) is not None:
                named.append(_Named(called, file.quantization, guess, is_estimate=True))
            continue
        with file:
            one = asked.fit_of(file, projector)
        named.append(_Named(called, one.file_type, one))
    asked.speeds.keep()
    out.clear_progress()
    named.sort(key=lambda row: row.fit.file_bytes)
    best = best_of([row.fit for row in named])
    if not as_json:
        _show_table(named, best, asked)
    return {"name": name, "quantizations": [_as_json(row, best == number) for number, row in enumerate(named)]}


def _headers(name: str, settings: Settings) -> Iterator[_Header]:
    """Yield the display name and header of each quantization that `name` refers to, and its projector.

    `name` may be a file, a local model or a name that covers several quantizations. No request is made for local
    models. Offline, catalogue models that are not local have no header. If one of several headers cannot be read, a
    note is printed. This function may raise any LlmrunError from the hub or the reader.
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
        yield meant.name or meant.path.name, file, _projector_beside(file, settings)
        return
    held = here(meant)
    if held and (not leaves_open(meant) or _are_all(held, meant)):
        yield from _held(held, settings)
        return
    estimated = _estimated(meant, {one for one, _ in held})
    if (held or estimated) and is_offline(settings.offline):
        out.note(f"{meant.name}: offline: {_instead(held, estimated)}")
        yield from _held(held, settings)
        yield from estimated
        return
    refuse_if_offline(meant, settings.offline)
    try:
        yield from _offered(meant, dict(held), HubReporter(), settings)
    except NetworkError as error:
        if not held and not estimated:
            raise type(error)(_naming(meant, error), hint=error.hint or _NO_NETWORK) from error
        out.note(f"{_naming(meant, error)}; {_instead(held, estimated)}")
        yield from _held(held, settings)
        yield from estimated


def _estimated(meant: Wanted, held: Collection[str]) -> list[_Header]:
    """Return the quantizations of a catalogue model that are not local and whose size is known."""
    from llmrun.hub.resolve.offers import leaves_open

    entry = meant.entry
    if entry is None:
        return []
    wants_all = meant.name == entry.name and leaves_open(meant)
    names = {entry.name_with(quant): quant for quant in entry.quants if entry.size_of(quant) is not None}
    return [
        (name, _CatalogQuant(entry, quant), None)
        for name, quant in names.items()
        if name not in held and (name == meant.name or wants_all)
    ]


def _instead(held: Collection[object], estimated: Collection[object]) -> str:
    if not estimated:
        return "showing local models only"
    return "estimated from the catalogue (~)" + (", except for local models" if held else "")


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


def _held(held: Sequence[tuple[str, Path]], settings: Settings) -> Iterator[_Header]:
    from llmrun.formats.gguf.reader import open_gguf

    for name, path in held:
        file = open_gguf(path)
        yield name, file, _projector_beside(file, settings)


def _projector_beside(file: GGUFFile, settings: Settings) -> ProjectorHeader | None:
    """Return the projector next to a local model, or None if there is none that fits the model."""
    from llmrun.backends.fitting import ProjectorHeader
    from llmrun.cli.vision_output import vision_facts
    from llmrun.formats.gguf.reader import open_gguf

    facts = None if settings.mmproj == MMPROJ_OFF else vision_facts(file, settings)
    if facts is None or facts.projector is None:
        if facts is not None:
            out.note(f"{file.path.name}: the projector is not counted: {facts.problem}")
        return None
    return ProjectorHeader(open_gguf(facts.projector.path), facts.projector)


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


def _offered(meant: Wanted, held: dict[str, Path], reporter: HubReporter, settings: Settings) -> Iterator[_Header]:
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
    projectors = {} if settings.mmproj == MMPROJ_OFF else _remote_projectors(artifacts, settings, reporter)
    for artifact in artifacts:
        file = local[artifact.name] if artifact.name in local else found[artifact.name]
        if isinstance(file, LlmrunError):
            out.note(f"{artifact.name}: {file}")
        else:
            here = _projector_beside(file, settings) if artifact.name in local else None
            yield artifact.name, file, here or projectors.get(artifact.name)


def _remote_projectors(
    artifacts: Sequence[Artifact], settings: Settings, reporter: HubReporter
) -> dict[str, ProjectorHeader | ImageCosts]:
    """Return the projector of each model on the Hub, of which only the header is fetched."""
    from llmrun.backends.fitting import ProjectorHeader
    from llmrun.backends.registry import ImageCosts
    from llmrun.hub.names import HubSource
    from llmrun.hub.remote.huggingface import listing
    from llmrun.hub.remote.model_headers import read_header
    from llmrun.hub.resolve.projectors import projector_on_hub
    from llmrun.model.vision.projector import projector_in

    @functools.cache
    def listed(repository: str, commit: str) -> Listing:
        return listing(HubSource(repository, revision=commit))

    def header(projector: Artifact) -> ProjectorHeader | ImageCosts:
        """Return the header of a projector, or only its size if it cannot be read."""
        try:
            file = read_header(projector)
            least, most = settings.image_min_tokens, settings.image_max_tokens
            return ProjectorHeader(file, projector_in(file, least=least, most=most))
        except LlmrunError as error:
            out.note(f"{projector.name}: {error}")
            return ImageCosts(projector.size)

    headers: dict[Source, ProjectorHeader | ImageCosts] = {}
    projectors: dict[str, ProjectorHeader | ImageCosts] = {}
    for artifact in artifacts:
        if isinstance(artifact.source, HubSource):
            try:
                known = listed(artifact.source.repository, artifact.commit)
            except LlmrunError as error:
                out.note(f"{artifact.name}: the size of its projector is unknown: {error}")
                return projectors
            found = projector_on_hub(artifact, reporter, known)
            if found is not None:
                if found.source not in headers:
                    headers[found.source] = header(found)
                projectors[artifact.name] = headers[found.source]
    return projectors


# --- the table --------------------------------------------------------------------------------------------------------


def _show_table(named: Sequence[_Named], best: int | None, asked: _FitFlags) -> None:
    from llmrun.cli.console.output import narrowed
    from llmrun.cli.recommendation_output import disturbance_words

    heading = _heading(asked, [row.fit for row in named if not row.is_estimate] or [named[0].fit])
    if disturbance := next((row.fit.disturbance for row in named if row.fit.disturbance), ""):
        heading.append(f"      {disturbance_words(disturbance)}")
    out.lines([row for line in heading for row in hanging(line, room(sys.stdout))], dim=True)
    rows = [_cells(row, best == number and len(named) > 1) for number, row in enumerate(named)]
    heads = [head for head in rows[0] if not head.strip() or any(row[head] for row in rows)]
    lines = narrowed(heads, [[row[head] for head in heads] for row in rows], _NUMBERS, _DROPPABLE)
    out.lines(lines[:1], dim=True)
    out.lines(lines[1:])


def _cells(row: _Named, is_best: bool) -> dict[str, str]:
    """Return the cells by column heading. The first and the last column have empty headings."""
    from llmrun.backends.experience import RUNS

    one, speed = row.fit, row.fit.forecast
    per_second = (speed.decode_per_second or speed.prefill_per_second) if speed else None
    about = "~" if row.is_estimate else ""
    doubts = ["?" if one.disturbance and origin != RUNS else "" for origin in (one.prefill_origin, one.decode_origin)]
    parts = {
        "WEIGHTS": format_bytes(one.footprint.weights),
        "KV" if one.generates else "TEXT": format_bytes(one.footprint.cache.of(one.context)),
        "SCRATCH": format_bytes(one.footprint.scratch + one.footprint.vocabulary),
        "VISION": format_bytes(one.vision) if one.vision else "",
        "PHOTO": "" if one.images is None or one.images.photo_s is None else format_seconds_roughly(one.images.photo_s),
        "ON GPU": f"{one.gpu_layers} of {one.layers}" if one.layers else "",
    }
    return {
        "": "*" if is_best else "",
        "MODEL": row.name,
        "QUANT": row.quantization,
        "FILE": f"{about}{format_bytes(one.file_bytes)}",
        "MEMORY": f"{about}{format_bytes(one.needed)}",
        **(dict.fromkeys(parts, "") if row.is_estimate else parts),
        "TTFT" if one.generates else "PER TEXT": (
            f"{format_seconds_roughly(speed.ttft_s)}{doubts[0]}" if speed and speed.ttft_s is not None else ""
        ),
        "TOK/S": f"{about}{per_second:.0f}{doubts[one.generates]}" if per_second else "",
        " ": _verdict(one, is_best),
    }


def _verdict(one: Fit, is_best: bool) -> str:
    from llmrun.backends.experience import CORRECTED, RUNS
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
    is_certain = not one.disturbance or one.decode_origin == RUNS
    if one.forecast is not None and is_certain and (one.forecast.decode_per_second or FLUENT) < FLUENT:
        words += ", slow"
    if one.decode_origin in (RUNS, CORRECTED):
        words += ", speed from your runs" if one.decode_origin == RUNS else ", speed corrected by your runs"
    return f"{words}: the best choice" if is_best else words


def _heading(asked: _FitFlags, fits: Sequence[Fit]) -> list[str]:
    """Return the lines above the table, which show this machine's resources and the assumptions for the estimates."""
    one, types = fits[0], dict.fromkeys(each.footprint.kv_type for each in fits)
    what, cache = ("prompt", f", a KV cache of {' or '.join(types)}") if one.generates else ("text", "")
    lines = [
        _here(asked),
        f"for   {one.context:,} tokens of context (-c), a {what} of {asked.prompt:,} (-p){cache}",
    ]
    if one.trained_context and one.context > one.trained_context:
        lines.append(f"      the model was trained for {one.trained_context:,} tokens of context")
    return lines


def _here(asked: _FitFlags) -> str:
    """Return the line that shows this machine's resources."""
    found = asked.resources
    memory = f"{format_bytes(found.memory)} of memory free" if found.memory is not None else "free memory unknown"
    gpus = [f"{gpu['description']}: {format_bytes(gpu['free'])} free" for gpu in found.gpus]
    return "here  " + ", ".join([memory, *gpus, counted(found.threads, "thread")])


# --- JSON -------------------------------------------------------------------------------------------------------------


def _machine_as_json(asked: _FitFlags) -> dict[str, Any]:
    here = asked.resources
    return {"memory_free": here.memory, "gpus": list(here.gpus), "threads": here.threads}


def _as_json(row: _Named, is_best: bool) -> dict[str, Any]:
    one, speed = row.fit, row.fit.forecast
    parts = {
        "memory_of_weights": one.footprint.weights,
        "memory_mapped": one.footprint.mapped,
        "memory_of_kv_cache": one.footprint.cache.of(one.context),
        "memory_of_scratch": one.footprint.scratch + one.footprint.vocabulary,
        "memory_of_vision": one.vision,
        "photo_s": None if one.images is None else one.images.photo_s,
        "peak_memory": one.footprint.total(one.context) + one.vision,
    }
    return {
        "name": row.name,
        "architecture": one.architecture,
        "quantization": row.quantization,
        "file_bytes": one.file_bytes,
        "parameters": one.parameters,
        "backend": one.backend,
        "context_size": one.context,
        "trained_context": one.trained_context,
        "kv_type": None if row.is_estimate else one.footprint.kv_type,
        "memory_needed": one.needed,
        **(dict.fromkeys(parts) if row.is_estimate else parts),
        "gpu_layers": one.gpu_layers,
        "layers": one.layers,
        "fits": one.fits,
        "in_memory": one.in_memory,
        "best": is_best,
        "ttft_s": speed.ttft_s if speed else None,
        "prefill_per_second": speed.prefill_per_second if speed else None,
        "decode_per_second": speed.decode_per_second if speed else None,
        "decode_from": one.decode_origin or None,
        "prefill_from": one.prefill_origin or None,
        "disturbance": one.disturbance or None,
        "estimated": row.is_estimate,
    }
