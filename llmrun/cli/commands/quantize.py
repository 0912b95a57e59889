"""Make a smaller file of a model with llama.cpp's quantizer.

IN should be a model in F16, BF16 or F32, or a vision projector, which can only become Q8_0. TYPE is the type of the new
file, such as Q4_K_M, IQ4_XS or Q8_0. OUT is created only when its contents are complete. An importance matrix, which
llmrun imatrix computes, makes types of four bits and fewer more accurate. The smallest types require an importance
matrix.

Examples:
    llmrun quantize qwen3-4b-f16.gguf qwen3-4b-q4_k_m.gguf Q4_K_M
    llmrun quantize model-f16.gguf model-iq2_m.gguf IQ2_M --imatrix imatrix.gguf
    llmrun quantize model-f16.gguf model-q5_k_m.gguf Q5_K_M --dry-run
    llmrun quantize mmproj-gemma-3-4b-f16.gguf mmproj-gemma-3-4b-q8_0.gguf Q8_0
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.base.amounts import counted, format_bytes, format_seconds
from llmrun.base.errors import UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings, check_gguf_name
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import HubReporter, progress_bar
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.settings import model_named

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.jobs.quantizing import Job, Plan

LISTING = {"heading": "Make model files", "place": 130}
_LABEL = 11  # width in columns


def _types() -> list[str]:
    from llmrun.jobs.file_types import FILE_TYPE_NAMES

    return list(FILE_TYPE_NAMES)


def _weight_types() -> list[str]:
    from llmrun.jobs.file_types import weight_type_names

    return list(weight_type_names())


def command(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="Model, preset or .gguf file.", autocompletion=options.models)
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write; must not exist.")],
    file_type: Annotated[
        str, typer.Argument(metavar="TYPE", help="Type of the new file, such as Q4_K_M.", autocompletion=_types)
    ],
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="Importance matrix, from llmrun imatrix.")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="Use one weight type for all matrices.")] = False,
    output_type: Annotated[
        str | None,
        typer.Option(
            "--output-type",
            metavar="TYPE",
            help="Weight type of the output matrix.  [default: by TYPE]",
            autocompletion=_weight_types,
        ),
    ] = None,
    embedding_type: Annotated[
        str | None,
        typer.Option(
            "--embedding-type",
            metavar="TYPE",
            help="Weight type of the token embedding.  [default: by TYPE]",
            autocompletion=_weight_types,
        ),
    ] = None,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Allow models that are already quantized.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the size of the new file without writing it.")
    ] = False,
    threads: options.Threads = None,
    json_output: options.Json = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> int:
    settings = apply_settings({"quiet": quiet, "offline": offline, "threads": threads})
    source = model_named(source)
    if is_endpoint(source):
        raise UsageError(f"{source}: a server's models cannot be quantized", hint="name a model on this machine")
    check_gguf_name(target)

    from llmrun.hub.names import is_projector
    from llmrun.jobs.file_types import COPY, file_type_named, weight_type_named

    chosen = file_type_named(file_type)
    output = None if output_type is None else weight_type_named(output_type, "--output-type")
    embedding = None if embedding_type is None else weight_type_named(embedding_type, "--embedding-type")
    # Only the header tells whether a file is a projector, which needs no llama.cpp.
    # Without llama.cpp, no model is downloaded only to find that out.
    if not (Path(source).is_file() or is_projector(source)):
        _check_quantizer()

    from llmrun.backends.llama.imatrix_file import read_imatrix
    from llmrun.base.machine.cpu_count import default_threads
    from llmrun.formats.gguf.metadata import check_is_model
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.hub.local.safe_writes import in_use
    from llmrun.hub.resolve.model_file import resolve
    from llmrun.jobs.batching.journal import check_absent
    from llmrun.jobs.quantizing import Job, plan_of, without_data
    from llmrun.jobs.quantizing_projectors import plan_of_projector
    from llmrun.model.vision.projector import is_projector_file

    if not dry_run:
        check_absent(target)
    job = Job(
        chosen,
        settings.threads or default_threads(),
        imatrix=None if imatrix is None else read_imatrix(imatrix),
        imatrix_path=None if imatrix is None else str(imatrix),
        output_type=output,
        embedding_type=embedding,
        pure=pure,
        allow_requantize=allow_requantize,
        only_copy=chosen.name == COPY,
    )
    found = resolve(source, offline=settings.offline, reporter=HubReporter())
    with in_use(found.path), open_gguf(found.path) as file:
        if of_projector := is_projector_file(file):
            for flag, value in {
                "--imatrix": imatrix,
                "--pure": pure,
                "--output-type": output,
                "--embedding-type": embedding,
                "--allow-requantize": allow_requantize,
            }.items():
                if value:
                    raise UsageError(f"{flag}: not for vision projectors", hint="leave out the flag")
            plan = plan_of_projector(file, chosen)
        else:
            check_is_model(file)
            _check_quantizer()
            plan = plan_of(file, job)
        if job.imatrix is not None and (missing := without_data(plan, job.imatrix)):
            out.note(f"--imatrix: the file has no data for {counted(len(missing), 'tensor')}, such as {missing[0]}")
        if dry_run:
            _show(_body(file, target, job, plan, plan.n_bytes), as_json=json_output)
            return 0
        started = time.monotonic()
        n_bytes = _written(file, target, job, plan, of_projector=of_projector)
        body = _body(file, target, job, plan, n_bytes) | {"seconds": round(time.monotonic() - started, 3)}
    _show(body, as_json=json_output)
    if of_projector:
        return 0
    compare = shell.words(["llmrun", "eval", str(target), "--against", source, "--text"])
    out.note(f"to measure the loss: {compare} FILE")
    return 0


def _check_quantizer() -> None:
    """Raise UsageError if llama.cpp is not installed."""
    from llmrun.backends.llama.kind import KIND

    if (probe := KIND.probe()).missing:
        raise UsageError(f"{probe.missing}: the quantizer is part of llama.cpp", hint=probe.hint)


def _written(file: GGUFFile, target: Path, job: Job, plan: Plan, *, of_projector: bool) -> int:
    """Write the new file and return its size in bytes."""
    from llmrun.jobs.quantizing import quantize
    from llmrun.jobs.quantizing_projectors import quantize_projector

    def show(share: float) -> None:
        out.progress(f"quantizing  {progress_bar(share)}  {share:.0%}")

    try:
        if of_projector:
            return quantize_projector(file, target, job.file_type, plan, show)
        return quantize(file, target, job, plan, show)
    finally:
        out.clear_progress()


def _body(file: GGUFFile, target: Path, job: Job, plan: Plan, n_bytes: int) -> dict[str, Any]:
    from llmrun.model.archs.parts.tensors import quantization

    return {
        "model": {
            "path": str(file.path),
            "file_type": quantization(file),
            "bytes": file.file_bytes,
            "bits_per_weight": round(plan.old_bits, 4),
        },
        "quantized": {
            "path": str(target),
            "file_type": job.file_type.name,
            "bytes": n_bytes,
            "bits_per_weight": round(plan.new_bits, 4),
            "tensors": dict(plan.types),
        },
    }


def _show(body: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        out.json(body)
    else:
        out.lines(_lines(body))


def _lines(body: dict[str, Any]) -> Iterator[str]:
    new = body["quantized"]
    for label, one in (("model", body["model"]), ("quantized", new)):
        size, bits = format_bytes(one["bytes"]), f"{one['bits_per_weight']:.2f} bits per weight"
        yield f"{label:{_LABEL}}{one['path']}  {one['file_type']}, {size}, {bits}"
    yield f"{'size':{_LABEL}}{new['bytes'] / body['model']['bytes']:.1%} of the model"
    yield f"{'tensors':{_LABEL}}{', '.join(f'{count:,} {name}' for name, count in new['tensors'].items())}"
    if "seconds" in body:
        yield f"{'time':{_LABEL}}{format_seconds(body['seconds'])}"
