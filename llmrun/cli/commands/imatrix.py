"""Compute an importance matrix from a text, for llmrun quantize.

The CPU engine runs the model on the text. The file records how large the inputs of each matrix are, so that llmrun
quantize can round the important weights more carefully. The text should resemble what the model will read. The file has
the same format as the output of llama-imatrix.

Examples:
    llmrun imatrix qwen3-4b-f16.gguf -f calibration.txt -o imatrix.gguf
    llmrun imatrix qwen3:4b:Q8_0 -f calibration.txt -o imatrix.gguf --chunks 100
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.base.amounts import counted, format_bytes, format_seconds
from llmrun.base.errors import UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings, required_model
from llmrun.cli.arguments.prompts import STDIN, read_long_text
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import HubReporter
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.settings import model_named

if TYPE_CHECKING:
    from io import FileIO

    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.jobs.importance import ImatrixCollector

LISTING = {"heading": "Make model files", "place": 131}
_LABEL = 10  # width in columns
_EXAMPLE = "llmrun imatrix qwen3-4b-f16.gguf -f calibration.txt -o imatrix.gguf"


def command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model, preset or .gguf file.", autocompletion=options.models)
    ] = None,
    *,
    same: options.SameAsModel = None,
    text: Annotated[
        Path | None, typer.Option("-f", "--text", metavar="FILE", help="Text to read.  [default: standard input]")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write; must not exist.")],
    context: Annotated[
        int, typer.Option("-c", "--context", "--ctx-size", metavar="N", min=8, help="Tokens per chunk of the text.")
    ] = 512,
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="N", min=1, help="Read only the first N chunks.  [default: all]")
    ] = None,
    process_output: Annotated[bool, typer.Option("--process-output", help="Include the output matrix.")] = False,
    threads: options.Threads = None,
    json_output: options.Json = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> int:
    settings = apply_settings({"quiet": quiet, "offline": offline, "threads": threads})
    model = model_named(required_model(model, same, _EXAMPLE))
    if is_endpoint(model):
        raise UsageError(
            f"{model}: a server does not show the inputs of its matrices", hint="name a model on this machine"
        )
    from llmrun.jobs.batching.journal import check_absent

    check_absent(output)
    read = read_long_text(text, hint=f"for example: {_EXAMPLE}")

    # Heavy imports must stay below this line, so that usage errors appear immediately.
    from llmrun.backends.base import OpenOptions
    from llmrun.base.errors import kernel_warnings_told
    from llmrun.cli.answers.loading import ModelLoading
    from llmrun.hub.local.safe_writes import in_use
    from llmrun.hub.resolve.model_file import resolve

    found = resolve(model, offline=settings.offline, reporter=HubReporter())
    loading = ModelLoading(found.name, found.path)
    loading.begin()
    from llmrun.cli.answers.room import make_room_for
    from llmrun.jobs.importance import open_cpu_backend

    # Rounding keys and values to 8 bits would change the inputs of the matrices slightly.
    wanted = OpenOptions("cpu", context, threads=settings.threads, kv_type="f16", progress=loading)
    with in_use(found.path):
        make_room_for(found.path, wanted)
        with kernel_warnings_told(out.note):
            backend = open_cpu_backend(found.path, wanted)
        loading.end()
        try:
            source = text or Path(STDIN)
            return _run(backend, read, chunks, source, output, with_output=process_output, as_json=json_output)
        finally:
            backend.close()


def _run(
    backend: CpuBackend,
    text: str,
    most: int | None,
    dataset: Path,
    output: Path,
    *,
    with_output: bool,
    as_json: bool,
) -> int:
    """Read the text, write the file and print the report. After Ctrl-C, the file covers the chunks read so far."""
    from llmrun.jobs.batching.journal import absent_file
    from llmrun.jobs.evaluation.measuring import contexts_of

    context = backend.info.context_size
    chunks = contexts_of(text, backend.tokenizer, context, most)
    started = time.monotonic()
    with absent_file(output) as file:
        collector, signals = _collected(backend, chunks, with_output=with_output)
        if signals:
            out.note(f"stopped after {collector.chunks:,} of {counted(len(chunks), 'chunk')}")
        if not collector.chunks:
            raise SystemExit(128 + signals[0])
        matrices = _write(file, collector, dataset, context)
    body = {
        "model": backend.info.path,
        "path": str(output),
        "bytes": output.stat().st_size,
        "matrices": matrices,
        "chunks": collector.chunks,
        "context": context,
        "complete": not signals,
        "seconds": round(time.monotonic() - started, 3),
    }
    if as_json:
        out.json(body)
    else:
        out.lines(_lines(body))
    if signals:
        return 128 + signals[0]
    use = shell.words(["llmrun", "quantize", backend.info.path, "OUT", "IQ4_XS", "--imatrix", str(output)])
    out.note(f"to use it: {use}")
    return 0


def _collected(
    backend: CpuBackend, chunks: NDArray[np.int32], *, with_output: bool
) -> tuple[ImatrixCollector, Sequence[int]]:
    """Read the chunks, or stop when a signal arrives. Return the collector and the signals."""
    from llmrun.cli.answers.answering import cancelling
    from llmrun.cli.evaluating import followed
    from llmrun.jobs.importance import ImatrixCollector

    with backend.summing(with_output=with_output) as team, cancelling(backend.cancel) as signals:
        collector = ImatrixCollector(backend, team)
        followed(map(collector.add, chunks), len(chunks), "chunk", signals)
    out.clear_progress()
    return collector, signals


def _write(file: FileIO, collector: ImatrixCollector, dataset: Path, context: int) -> int:
    """Write the file and return the number of matrices in it."""
    from llmrun.backends.llama.imatrix_file import Imatrix, write_imatrix

    entries = collector.entries()
    name = os.fsencode(dataset).decode(errors="replace")
    write_imatrix(file, Imatrix(entries, (name,), collector.chunks, context))
    _tell(collector, len(entries))
    return len(entries)


def _tell(collector: ImatrixCollector, matrices: int) -> None:
    """Print a note if the text did not use all experts."""
    if unused := collector.unused_experts():
        name = max(unused, key=lambda name: unused[name])
        out.note(
            f"{len(unused):,} of {matrices:,} matrices have experts that the text never used, for example "
            f"{unused[name]:,} in {name}; use a longer or more varied text"
        )


def _lines(body: dict[str, Any]) -> Iterator[str]:
    yield f"{'model':{_LABEL}}{body['model']}"
    yield f"{'text':{_LABEL}}{counted(body['chunks'], 'chunk')} of {body['context']:,} tokens"
    yield f"{'imatrix':{_LABEL}}{body['path']}  {body['matrices']:,} matrices, {format_bytes(body['bytes'])}"
    yield f"{'time':{_LABEL}}{format_seconds(body['seconds'])}"
