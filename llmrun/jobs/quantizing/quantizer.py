"""Runs llama.cpp's quantizer in a child process, and reports its failures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.backends.llama.log_lines import refusal
from llmrun.backends.llama.process import LlamaProcess
from llmrun.base.errors import BackendCrashed, DoesNotFit, LlmrunError, ModelFileError, UsageError
from llmrun.base.machine.shell import words
from llmrun.formats.gguf.problems import shown
from llmrun.formats.quants.registry import BY_NAME
from llmrun.jobs.batching.files import MORE_ROOM, absent_file
from llmrun.jobs.quantizing.plan import Plan, PlannedTensor, plan_from_log

if TYPE_CHECKING:
    from llmrun.backends.llama.quantizing.imatrix_file import Imatrix
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.jobs.quantizing.file_types import FileType

_WORKER = "backends.llama.quantizing.worker"
_STREAM_FAILED = "iostream error"  # all that C++ says about a failed write
_BY_LOOKUP = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")  # no imatrix has the inputs of these


@dataclass(frozen=True, slots=True)
class Job:
    """The type and the options of a quantization. The options are those of llama-quantize.

    imatrix_path    the file of `imatrix`; its name becomes metadata of the new file
    output_type     the weight type of the output matrix, or None for llama.cpp's choice
    embedding_type  the weight type of the token embedding, or None for llama.cpp's choice
    pure            use the file type's main weight type for all tensors
    """

    file_type: FileType
    threads: int
    imatrix: Imatrix | None = None
    imatrix_path: str | None = None
    output_type: str | None = None
    embedding_type: str | None = None
    pure: bool = False
    allow_requantize: bool = False
    only_copy: bool = False


def plan_of(file: GGUFFile, job: Job) -> Plan:
    """Let llama.cpp choose the types of the new tensors, which takes a fraction of a second.

    Raises UsageError if the job needs an imatrix or would quantize again without permission, ModelFileError if the
    imatrix belongs to another model, UnsupportedModel and BackendCrashed.
    """
    answer = _asked(file.path, Path(), job, dry_run=True)
    if answer["failed"]:
        raise refusal(str(file.path), answer["failed"], ())
    plan = plan_from_log(file, answer["log"])
    if plan.needs_imatrix:
        compute = words(["llmrun", "imatrix", str(file.path), "-f", "TEXT", "-o", "imatrix.gguf"])
        raise UsageError(
            f"{job.file_type.name}: needs an importance matrix, because the model would be unusable without one",
            hint=f"compute one: {compute}; then add --imatrix imatrix.gguf",
        )
    if job.imatrix is not None:
        _check_imatrix(plan, job.imatrix, str(job.imatrix_path))
    if plan.requantized and not job.allow_requantize:
        raise UsageError(
            f"{file.path}: {len(plan.requantized)} tensors are quantized already, such as "
            f"{shown(plan.requantized[0].old.name)} ({plan.requantized[0].old.type.name})",
            hint="quantize the F16 or BF16 original, or accept the loss of quality with --allow-requantize",
        )
    return plan


def without_data(plan: Plan, imatrix: Imatrix) -> list[str]:
    """Return the names of tensors that will be quantized but that the importance matrix does not have."""
    return [one.old.name for one in _weighted(plan) if one.old.name not in imatrix.entries]


def _weighted(plan: Plan) -> list[PlannedTensor]:
    """Return the tensors that an importance matrix is for."""
    quantized = (one for one in plan.tensors if one.is_converted and one.type.block_weights > 1)
    return [one for one in quantized if one.old.name not in _BY_LOOKUP]


def quantize(file: GGUFFile, out: Path, job: Job, plan: Plan, progress: Callable[[float], None]) -> int:
    """Write the new file, which appears under its name when it is complete, and return its size in bytes.

    progress  called with the share that is done

    Raises UsageError if `out` exists, DoesNotFit if the disk is too small, BackendCrashed and LlmrunError.
    """
    with absent_file(out, plan.n_bytes) as new:
        partial = Path(str(new.name))
        answer = _asked(file.path, partial, job, dry_run=False, progress=lambda n: progress(plan.done_before(int(n))))
        if _STREAM_FAILED in answer["failed"]:
            free = shutil.disk_usage(out.parent).free
            raise DoesNotFit(
                f"disk: {out.parent}: {out.name} could not be written completely: {free:,} bytes free",
                hint=MORE_ROOM,
            )
        if answer["failed"]:
            raise LlmrunError(
                f"llama.cpp cannot quantize {file.path}: {shown(answer['failed'], 200)}",
                hint="try another TYPE; llmrun verify checks the file",
            )
        file.check_in_place()
        return partial.stat().st_size


def _check_imatrix(plan: Plan, imatrix: Imatrix, path: str) -> None:
    """Raise ModelFileError unless the importance matrix has the shapes of this model."""
    for one in plan.tensors:
        entry = imatrix.entries.get(one.old.name)
        inputs = one.old.shape[0] * (one.old.shape[2] if len(one.old.shape) > 2 else 1)
        if entry is not None and len(entry.sums) != inputs:
            raise ModelFileError(
                f"{path}: {shown(one.old.name)}: {len(entry.sums):,} sums, but the tensor has {inputs:,} inputs",
                hint="use the importance matrix of this model",
            )
    if len(without_data(plan, imatrix)) == len(_weighted(plan)) > 0:
        raise ModelFileError(f"{path}: it has no tensor of this model", hint="use the importance matrix of this model")


def _asked(
    path: Path, out: Path, job: Job, *, dry_run: bool, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Ask a new process, which is killed if the wait is interrupted."""
    process = LlamaProcess(_WORKER)
    doing = f"quantizing {path}"
    output_type, embedding_type = (
        None if name is None else BY_NAME[name].ggml_id for name in (job.output_type, job.embedding_type)
    )
    try:
        number = process.tell(
            "quantize",
            path=str(path),
            out=str(out),
            file_type=job.file_type.number,
            threads=job.threads,
            imatrix=job.imatrix_path,
            output_type=output_type,
            embedding_type=embedding_type,
            pure=job.pure,
            allow_requantize=job.allow_requantize,
            only_copy=job.only_copy,
            dry_run=dry_run,
        )
        return process.answer(number, doing, progress)
    except BackendCrashed as error:
        raise BackendCrashed(str(error), hint="check the file with llmrun verify, or try another TYPE") from error
    except BaseException:
        process.kill()
        raise
    finally:
        process.close()
