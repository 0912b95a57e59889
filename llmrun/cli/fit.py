"""`llmrun fit`: does a model fit this machine, and how fast will it be, before anything is downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli import options
from llmrun.cli.amounts import bytes_in_words
from llmrun.cli.output import out
from llmrun.errors import DoesNotFit, LlmrunError
from llmrun.settings import load_settings

if TYPE_CHECKING:
    from llmrun.backends.fitting import Fit, Resources
    from llmrun.gguf.reader import GGUFFile
    from llmrun.settings import Settings


def fit(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Names, hf:OWNER/NAME[:QUANT], URLs or .gguf files.")
    ],
    ctx_size: Annotated[
        int | None, typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of context.  [default: 4096]", min=1)
    ] = None,
    prompt: Annotated[
        int, typer.Option("-p", "--prompt", metavar="N", help="Tokens of the prompt that TTFT is told for.", min=1)
    ] = 512,
    kv_type: options.KVType = None,
    threads: options.Threads = None,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure this machine again, rather than use what is known of it.")
    ] = False,
    json_output: options.Json = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Tell whether models fit this machine, and how fast they will be.

    Of a model that is not here only the header is fetched. A name that leaves the quantization open is told for all of
    them, the best choice marked. Memory is the sum of weights, KV cache and scratch; speeds are what this machine was
    measured at, a few seconds once, applied to what the model needs.
    """
    del debug
    given = {"offline": offline, "quiet": quiet, "ctx_size": ctx_size, "kv_type": kv_type, "threads": threads}
    settings = load_settings({name: value for name, value in given.items() if value not in (None, False)})
    out.quiet, out.color = settings.quiet, settings.color
    asked = _Asked(settings, prompt, remeasure)
    shown = [_shown(name, asked, json_output) for name in models]
    if json_output:
        out.json({"machine": _machine_as_json(asked.resources), "models": shown})
    return 0 if all(any(row["fits"] for row in model["quantizations"]) for model in shown) else DoesNotFit.exit_code


class _Asked:
    """What every model is looked at with. The machine is measured when the first one needs it."""

    def __init__(self, settings: Settings, prompt: int, remeasure: bool) -> None:
        from llmrun.backends.cpu_count import default_threads
        from llmrun.backends.fitting import Resources
        from llmrun.backends.speeds import Speeds

        self.settings, self.prompt = settings, prompt
        threads = settings.threads or default_threads()
        self.speeds = Speeds.of_this_machine(threads, afresh=remeasure)
        self.resources = Resources.of_this_machine(threads=threads, speeds=self.speeds)

    def fit_of(self, file: GGUFFile) -> Fit:
        from llmrun.backends.fitting import fit_of

        context, kv_type = self.settings.ctx_size, self.settings.kv_type
        return fit_of(file, self.resources, context=context, kv_type=kv_type, prompt=self.prompt)


def _shown(name: str, asked: _Asked, as_json: bool) -> dict[str, Any]:
    """Show one model, or all quantizations of one; returns what --json says of it."""
    from llmrun.backends.fitting import best_of

    named: list[tuple[str, Fit]] = []
    for called, file in _headers(name, asked.settings):
        out.progress(f"{called}: measuring this machine (once)")
        with file:
            named.append((called, asked.fit_of(file)))
    asked.speeds.keep()
    out.clear_progress()
    named.sort(key=lambda pair: pair[1].file_bytes)
    best = best_of([one for _, one in named])
    if not as_json:
        _show_table(named, best, asked)
    rows = [_as_json(called, one, best == number) for number, (called, one) in enumerate(named)]
    return {"name": name, "quantizations": rows}


def _headers(name: str, settings: Settings) -> Iterator[tuple[str, GGUFFile]]:
    """(what to call it, its header) of a file, of a model that is here, or of all that can be had under the name.

    Raises every LlmrunError of hub and reader; one quantization of several whose header cannot be read is a note.
    """
    from llmrun.cli.progress import HubReporter
    from llmrun.gguf.reader import open_gguf
    from llmrun.hub import local
    from llmrun.hub.reference import LocalPath, understand
    from llmrun.hub.resolve import existing, refuse_if_offline

    meant = understand(name)
    if isinstance(meant, LocalPath):
        yield meant.path.name, open_gguf(existing(meant))
        return
    reporter = HubReporter()
    try:
        refuse_if_offline(meant, settings.offline)
    except LlmrunError:
        here = local.find(meant, reporter)
        if here is None:
            raise
        yield meant.name, open_gguf(here)
        return
    from llmrun.hub.headers import read_headers
    from llmrun.hub.offers import offers

    out.progress(f"{name}: asking what there is")
    artifacts = offers(meant, reporter)
    found = read_headers(artifacts, reporter)
    unread = [error for error in found if isinstance(error, LlmrunError)]
    if len(unread) == len(found):
        raise unread[0]
    for artifact, file in zip(artifacts, found, strict=True):
        if isinstance(file, LlmrunError):
            out.note(f"{artifact.name}: {file}")
        else:
            yield artifact.name, file


# --- the table --------------------------------------------------------------------------------------------------------


def _show_table(named: Sequence[tuple[str, Fit]], best: int | None, asked: _Asked) -> None:
    from llmrun.cli.columns import aligned

    out.lines([_heading(asked, named[0][1].context)], dim=True)
    with_gpu = any(one.layers for _, one in named)
    head = ["", "MODEL", "QUANT", "FILE", "MEMORY", "WEIGHTS", "KV", "SCRATCH"]
    head += [*(["ON GPU"] if with_gpu else []), "TTFT", "TOK/S", ""]
    rows = [_row(called, one, best == number, with_gpu) for number, (called, one) in enumerate(named)]
    lines = aligned([head, *rows], right=range(3, len(head) - 1))
    out.lines(lines[:1], dim=True)
    out.lines(lines[1:])


def _row(called: str, one: Fit, is_best: bool, with_gpu: bool) -> list[str]:
    speed = one.forecast
    return [
        "*" if is_best else "",
        called,
        one.file_type,
        bytes_in_words(one.file_bytes),
        bytes_in_words(one.needed),
        bytes_in_words(one.footprint.weights - one.footprint.mapped),
        bytes_in_words(one.context * one.footprint.kv_token),
        bytes_in_words(one.footprint.scratch + one.footprint.vocabulary),
        *([f"{one.gpu_layers} of {one.layers}"] if with_gpu else []),
        f"{speed.ttft_s:.2f} s" if speed else "",
        f"{speed.decode_per_second:.0f}" if speed else "",
        _verdict(one, is_best),
    ]


def _verdict(one: Fit, is_best: bool) -> str:
    from llmrun.backends.fitting import FLUENT

    if not one.fits:
        assert one.memory is not None
        return f"too big by {bytes_in_words(one.needed - one.memory)}"
    words = "fits"
    if one.gpu_layers:
        words = "fits the GPU" if one.gpu_layers == one.layers else "fits, partly on the GPU"
    elif one.backend == "llama":
        words = "fits, llama.cpp runs it"
    if one.forecast is not None and one.forecast.decode_per_second < FLUENT:
        words += ", slow"
    return f"{words}: the best choice" if is_best else words


def _heading(asked: _Asked, context: int) -> str:
    found = asked.resources
    memory = f"{bytes_in_words(found.memory)} of memory are free" if found.memory is not None else "free memory unknown"
    gpus = [f"{gpu['description']}: {bytes_in_words(gpu['free'])} free" for gpu in found.gpus]
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    return ", ".join([memory, *gpus, threads, f"a context of {context:,} tokens", f"a prompt of {asked.prompt:,}"])


# --- JSON -------------------------------------------------------------------------------------------------------------


def _as_json(called: str, one: Fit, is_best: bool) -> dict[str, Any]:
    speed = one.forecast
    return {
        "name": called,
        "architecture": one.architecture,
        "quantization": one.file_type,
        "file_bytes": one.file_bytes,
        "parameters": one.parameters,
        "backend": one.backend,
        "context_size": one.context,
        "memory_needed": one.needed,
        "memory_of_weights": one.footprint.weights - one.footprint.mapped,
        "memory_mapped": one.footprint.mapped,
        "memory_of_kv_cache": one.context * one.footprint.kv_token,
        "memory_of_scratch": one.footprint.scratch + one.footprint.vocabulary,
        "peak_memory": one.footprint.total(one.context),
        "gpu_layers": one.gpu_layers,
        "layers": one.layers,
        "fits": one.fits,
        "best": is_best,
        "ttft_s": speed.ttft_s if speed else None,
        "prefill_per_second": speed.prefill_per_second if speed else None,
        "decode_per_second": speed.decode_per_second if speed else None,
    }


def _machine_as_json(found: Resources) -> dict[str, Any]:
    return {"memory_free": found.memory, "gpus": list(found.gpus), "threads": found.threads}
