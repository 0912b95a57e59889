"""Quantizes a model with llama.cpp's quantizer, which runs in a child process, and reports its failures.

A quantization is planned first: llama.cpp chooses the new type of each tensor, which determines the size of the new
file. File types have the names that llama-quantize uses.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.backends.llama.log import refusal
from llmrun.backends.llama.process import LlamaProcess
from llmrun.base.errors import BackendCrashed, DoesNotFit, LlmrunError, ModelFileError, UsageError, shown
from llmrun.base.machine.shell import words
from llmrun.formats.gguf.format import DEFAULT_ALIGNMENT
from llmrun.formats.gguf.quantization import quantization_in
from llmrun.formats.quants.registry import BY_NAME
from llmrun.jobs.batching.journal import MORE_ROOM, absent_file
from llmrun.jobs.file_types import FileType

if TYPE_CHECKING:
    from llmrun.backends.llama.imatrix_file import Imatrix
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo
    from llmrun.formats.quants.weight_type import WeightType

_LINE = re.compile(
    r"\[ *\d+/ *\d+\] (.+?) +- \[[\d, ]*\], type = +\w+, size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\w+)\))?"
)
_NEEDS_IMATRIX = "will require an imatrix"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the model, and the tensor's type in the new file."""

    old: TensorInfo
    type: WeightType

    @property
    def n_bytes(self) -> int:
        return self.type.row_bytes(self.old.shape[0]) * self.old.n_rows

    @property
    def weights(self) -> int:
        return prod(self.old.shape)

    @property
    def is_converted(self) -> bool:
        return self.type is not self.old.type


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors of the new file, in the order of writing.

    header_bytes   the size of the old file's header; the new header has a similar size
    needs_imatrix  True if a type requires an importance matrix that is missing
    """

    tensors: Sequence[PlannedTensor]
    header_bytes: int
    needs_imatrix: bool

    @property
    def n_bytes(self) -> int:
        """The expected size of the new file."""
        return self.header_bytes + sum(-(-one.n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT for one in self.tensors)

    @property
    def old_bits(self) -> float:
        """The bits per weight in the tensors of the model."""
        return self._bits(sum(one.old.nbytes for one in self.tensors))

    @property
    def new_bits(self) -> float:
        """The bits per weight in the tensors of the new file."""
        return self._bits(sum(one.n_bytes for one in self.tensors))

    @property
    def types(self) -> list[tuple[str, int]]:
        """The types of the new tensors with the number of tensors of each type, most frequent first."""
        return Counter(one.type.name for one in self.tensors).most_common()

    @property
    def requantized(self) -> list[PlannedTensor]:
        """The tensors that are converted although they are already quantized."""
        return [one for one in self.tensors if one.is_converted and one.old.type.block_weights > 1]

    def done_before(self, number: int) -> float:
        """Return the share of the old file's bytes before the tensor with this one-based index."""
        sizes = [one.old.nbytes for one in self.tensors]
        return sum(sizes[: number - 1]) / sum(sizes)

    def _bits(self, n_bytes: int) -> float:
        return 8 * n_bytes / sum(one.weights for one in self.tensors)


def plan_from_log(file: GGUFFile, log: str) -> Plan:
    """Return the plan that llama.cpp reports in the log of a dry run."""
    tensors = list(_planned(file, log))
    if {one.old.name for one in tensors} != set(file.tensors):
        raise LlmrunError(
            f"llama.cpp's dry run lists {len(tensors)} of {len(file.tensors)} tensors",
            hint="this version of llama-cpp-python is not supported; install the version that llmrun doctor names",
        )
    header_bytes = file.file_bytes - sum(tensor.nbytes for tensor in file.tensors.values())
    return Plan(tensors, header_bytes, _NEEDS_IMATRIX in log)


def _planned(file: GGUFFile, log: str) -> Iterator[PlannedTensor]:
    for name, type_name in _LINE.findall(log):
        if name not in file.tensors:
            raise LlmrunError(f"llama.cpp's dry run names an unknown tensor: {shown(name)}")
        old = file.tensors[name]
        yield PlannedTensor(old, BY_NAME[type_name.upper()] if type_name else old.type)


_WORKER = "backends.llama.quantizer_worker"
_STREAM_FAILED = "iostream error"  # the C++ library's only message for a failed write
_BY_LOOKUP = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")  # tensors without imatrix entries


@dataclass(frozen=True, slots=True)
class Job:
    """The type and the options of a quantization, which match llama-quantize's options.

    imatrix_path    the file of `imatrix`; the file's name becomes metadata of the new file
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

    @property
    def is_by_type_alone(self) -> bool:
        """True if no option changes the usual tensor types or allows any input."""
        return not (self.only_copy or self.allow_requantize or self.pure or self.output_type or self.embedding_type)


def plan_of(file: GGUFFile, job: Job) -> Plan:
    """Let llama.cpp choose the types of the new tensors, which takes a fraction of a second. Return the plan.

    Raises UsageError if the job needs an imatrix, would change nothing, or would quantize again without permission,
    ModelFileError if the imatrix belongs to another model, UnsupportedModel and BackendCrashed.
    """
    written = quantization_in("", file.metadata.get("general.file_type"))  # a name could be wrong
    if job.is_by_type_alone and written == job.file_type.name:
        raise _unchanged(file, job)
    answer = _asked(file.path, Path(), job, dry_run=True)
    if answer["failed"]:
        raise refusal(str(file.path), answer["failed"], ())
    plan = plan_from_log(file, answer["log"])
    if plan.needs_imatrix:
        compute = words(["llmrun", "imatrix", str(file.path), "-f", "TEXT", "-o", "imatrix.gguf"])
        raise UsageError(
            f"{job.file_type.name}: needs an importance matrix, because the model would be unusable without one",
            hint=f"compute the matrix: {compute}; then add --imatrix imatrix.gguf",
        )
    if job.imatrix is not None:
        _check_imatrix(plan, job.imatrix, str(job.imatrix_path))
    if plan.requantized and not job.allow_requantize:
        raise UsageError(
            f"{file.path}: {len(plan.requantized)} tensors are quantized already, such as "
            f"{shown(plan.requantized[0].old.name)} ({plan.requantized[0].old.type.name})",
            hint="quantize the F16 or BF16 original, or accept the loss of quality with --allow-requantize",
        )
    if not (job.only_copy or job.allow_requantize or any(one.is_converted for one in plan.tensors)):
        raise _unchanged(file, job)
    return plan


def _unchanged(file: GGUFFile, job: Job) -> UsageError:
    return UsageError(
        f"{file.path}: the model is already {job.file_type.name}",
        hint="choose another TYPE, or copy the file; --allow-requantize runs the quantizer anyway",
    )


def without_data(plan: Plan, imatrix: Imatrix) -> list[str]:
    """Return the names of tensors that will be quantized but are missing from the importance matrix."""
    return [one.old.name for one in _weighted(plan) if one.old.name not in imatrix.entries]


def _weighted(plan: Plan) -> list[PlannedTensor]:
    """Return the tensors to which an importance matrix applies."""
    quantized = (one for one in plan.tensors if one.is_converted and one.type.block_weights > 1)
    return [one for one in quantized if one.old.name not in _BY_LOOKUP]


def quantize(file: GGUFFile, out: Path, job: Job, plan: Plan, progress: Callable[[float], None]) -> int:
    """Write the new file, which appears under its final name once complete, and return its size in bytes.

    progress  called with the completed share

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
        raise ModelFileError(f"{path}: no entries for this model", hint="use the importance matrix of this model")


def _asked(
    path: Path, out: Path, job: Job, *, dry_run: bool, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Send a request to a new process, and return the answer. The process is killed if the wait is interrupted."""
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
