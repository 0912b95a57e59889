"""Quantizes vision projectors to Q8_0, which llama.cpp's quantizer cannot do.

Only matrices that are multiplied by activations become Q8_0. Convolutions, tables of positions and vectors keep their
type, because libmtmd cannot use them otherwise. So do encoders for audio, and matrices whose rows are not a multiple of
32 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from llmrun.base.errors import ModelFileError, UsageError, shown
from llmrun.formats.gguf.format import BOOL_ID, SCALAR_TYPES
from llmrun.formats.gguf.writer import NewTensor, NewValue, file_bytes, header_bytes, write_gguf
from llmrun.formats.quants.registry import BY_NAME, unsound_blocks
from llmrun.jobs.batching.journal import absent_file
from llmrun.jobs.quantizing import Plan, PlannedTensor
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.tensors import quantizable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.metadata import Value
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.jobs.file_types import FileType

_TYPE: Final = BY_NAME["Q8_0"]
_FLOATS: Final = ("F32", "F16", "BF16")
_CHUNK: Final = 1 << 20  # weights to quantize at a time, rounded down to whole rows
_NOT_COPIED: Final = ("general.alignment", "split.no", "split.count", "split.tensors.count")
_NUMBERS: Final = {
    scalar.name: np.dtype("?" if id_ == BOOL_ID else scalar.layout.format) for id_, scalar in SCALAR_TYPES.items()
}


def plan_of_projector(file: GGUFFile, file_type: FileType) -> Plan:
    """Return the types of the new tensors.

    Raises UsageError for types other than Q8_0, and if the matrices are already quantized, and the errors of
    `read_projector`.
    """
    if file_type.name != _TYPE.name:
        raise UsageError(
            f"{file_type.name}: {shown(str(file.path), 300)} is a vision projector, which can only become {_TYPE.name}",
            hint=f"use {_TYPE.name}, which loses practically nothing",
        )
    projector = read_projector(file.path)
    matrices = [file.tensors[name] for name in quantizable(file, projector.family, projector.layouts.sizes.merge)]
    quantized = [one for one in matrices if one.type.name not in _FLOATS]
    if quantized:
        raise UsageError(
            f"{shown(str(file.path), 300)}: {len(quantized)} tensors are quantized already, such as "
            f"{shown(quantized[0].name)} ({quantized[0].type.name})",
            hint="quantize the F32, F16 or BF16 projector",
        )
    converted = {one.name for one in matrices if not one.shape[0] % _TYPE.block_weights}
    if not converted:
        raise UsageError(
            f"{shown(str(file.path), 300)}: no matrix has rows of a multiple of {_TYPE.block_weights} weights",
            hint="use the file as it is",
        )
    tensors = [PlannedTensor(one, _TYPE if one.name in converted else one.type) for one in file.tensors.values()]
    new = _new_tensors(file, tensors)
    return Plan(tensors, len(header_bytes(_metadata(file, file_type), new)), needs_imatrix=False)


def quantize_projector(
    file: GGUFFile, out: Path, file_type: FileType, plan: Plan, progress: Callable[[float], None]
) -> int:
    """Write the new file, which appears under its final name once complete, and return its size in bytes.

    progress  called with the completed share

    Raises UsageError if `out` exists, DoesNotFit if the disk is too small, and ModelFileError.
    """
    metadata, tensors = _metadata(file, file_type), _new_tensors(file, plan.tensors)
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def written(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(done / total)

    with absent_file(out, size := file_bytes(metadata, tensors)) as new:
        write_gguf(new, metadata, tensors, written)
        file.check_unchanged()
    return size


def _metadata(file: GGUFFile, file_type: FileType) -> Mapping[str, NewValue]:
    """Return the metadata of the new file, in which all numbers keep their types."""
    kept = {key: _typed(value, file.types[key]) for key, value in file.metadata.items() if key not in _NOT_COPIED}
    return kept | {"general.file_type": file_type.number, "general.quantization_version": 2}


def _typed(value: Value, type_name: str) -> NewValue:
    return cast("NewValue", _NUMBERS[type_name].type(value) if type_name in _NUMBERS else value)


def _new_tensors(file: GGUFFile, planned: Sequence[PlannedTensor]) -> list[NewTensor]:
    return [NewTensor(one.old.name, one.type, one.old.shape, partial(_data, file, one)) for one in planned]


def _data(file: GGUFFile, one: PlannedTensor) -> Iterator[NDArray[np.uint8]]:
    """Yield a tensor's bytes in its new type, a few rows at a time."""
    old, columns = one.old, one.old.shape[0]
    row_bytes, rows = old.type.row_bytes(columns), max(1, _CHUNK // columns)
    for start in range(0, old.n_rows, rows):
        piece = np.empty(row_bytes * min(rows, old.n_rows - start), np.uint8)
        file.read_into(old, row_bytes * start, piece)
        if one.is_converted:
            assert old.type.dequantize is not None
            assert one.type.quantize is not None
            with np.errstate(invalid="ignore"):
                piece = one.type.quantize(old.type.dequantize(piece))
            if unsound_blocks(one.type, piece).any():
                raise ModelFileError(
                    f"{shown(str(file.path), 300)}: {shown(old.name)} has weights that Q8_0 cannot store, such as NaN",
                    hint="llmrun verify checks the file",
                )
        yield piece
