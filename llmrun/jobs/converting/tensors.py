"""Turns the tensors of a checkpoint into those of a GGUF file. All values stay exactly the same.

Matrices of AWQ and GPTQ become Q4_0 or Q5_0. Other matrices keep their type. Biases and the weights of norms become
F32, because llama.cpp needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmrun.base.errors import ModelFileError
from llmrun.formats.gguf.problems import shown
from llmrun.formats.gguf.writer import NewTensor
from llmrun.formats.quants.registry import BY_NAME
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.forms import Module
from llmrun.jobs.converting.json_objects import unsupported
from llmrun.jobs.converting.packed_matrix import open_matrix
from llmrun.jobs.converting.quantization import Quantization
from llmrun.jobs.converting.safetensors import StoredTensor

_FLOATS = ("F32", "F16", "BF16")
_PARTS_OF_A_MATRIX = (".qweight", ".qzeros", ".scales", ".g_idx")
_PIECE_BYTES = 16 << 20

# Constants that old versions of transformers saved with the weights, and the output of models with tied embeddings.
_UNUSED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
_OUTPUT = "lm_head."


def tensors_of(
    checkpoint: Checkpoint, modules: list[Module], quantization: Quantization | None, *, tied: bool
) -> list[NewTensor]:
    """Return the tensors of these modules, whose data is read when they are written.

    Raises ModelFileError for missing tensors and wrong shapes, and UnsupportedModel for tensors that no module has.
    """
    tensors: list[NewTensor] = []
    used: set[str] = set()
    for module in modules:
        tensors.append(_weight(checkpoint, module, quantization))
        is_packed = f"{module.hf_name}.qweight" in checkpoint.tensors
        used |= {f"{module.hf_name}{part}" for part in (_PARTS_OF_A_MATRIX if is_packed else (".weight",))}
        bias = checkpoint.tensors.get(f"{module.hf_name}.bias")
        if bias is None and module.needs_bias:
            raise _missing(checkpoint, f"{module.hf_name}.bias")
        if bias is not None:
            used.add(bias.name)
            tensors += _bias(bias, module)
    for name, tensor in checkpoint.tensors.items():
        if name not in used and not name.endswith(_UNUSED) and not (tied and name.startswith(_OUTPUT)):
            raise unsupported(tensor.file.path, f"{shown(name)} is not a tensor of this kind of model")
    return tensors


def _weight(checkpoint: Checkpoint, module: Module, quantization: Quantization | None) -> NewTensor:
    name, packed = f"{module.name}.weight", checkpoint.tensors.get(f"{module.hf_name}.qweight")
    if packed is not None and module.inputs is not None:
        if quantization is None:
            seen = f"{shown(packed.name)} is quantized, but no {checkpoint.config.path.name} says how"
            raise unsupported(packed.file.path, seen)
        matrix = open_matrix(checkpoint.tensors, module.hf_name, module.outputs, module.inputs, quantization)
        return NewTensor(name, matrix.type, (module.inputs, module.outputs), lambda: matrix.blocks(module.rows()))
    stored = checkpoint.tensors.get(f"{module.hf_name}.weight")
    if stored is None:
        raise _missing(checkpoint, f"{module.hf_name}.weight")
    if module.inputs is None:
        return _vector(name, stored, module.outputs)
    _check(stored, (module.outputs, module.inputs))
    return NewTensor(name, BY_NAME[stored.dtype], (module.inputs, module.outputs), lambda: _pieces(stored, module))


def _pieces(stored: StoredTensor, module: Module) -> Iterator[NDArray[np.generic]]:
    if module.heads:
        yield stored.read()[module.rows()]
        return
    step = max(1, _PIECE_BYTES * module.outputs // max(stored.nbytes, 1))
    for first in range(0, module.outputs, step):
        yield stored.read_rows(first, min(first + step, module.outputs))


def _bias(stored: StoredTensor, module: Module) -> list[NewTensor]:
    """Return the bias, or nothing if it is 0, because AutoGPTQ adds such biases to all matrices."""
    _check(stored, (module.outputs,))
    if not module.needs_bias and not _float32(stored).any():
        return []
    if not module.bias:
        raise unsupported(stored.file.path, f"{shown(stored.name)} is a bias, which models of this form do not have")
    return [_vector(f"{module.name}.bias", stored, module.outputs, module.rows())]


def _vector(name: str, stored: StoredTensor, size: int, order: NDArray[np.int64] | slice = slice(None)) -> NewTensor:
    _check(stored, (size,))
    return NewTensor(name, BY_NAME["F32"], (size,), lambda: [_float32(stored)[order]])


def _float32(stored: StoredTensor) -> NDArray[np.float32]:
    dequantize = BY_NAME[stored.dtype].dequantize
    assert dequantize is not None  # all of _FLOATS have it
    return dequantize(stored.read().view(np.uint8))


def _check(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.dtype not in _FLOATS:
        seen = (
            f"is {stored.dtype}, but only {', '.join(_FLOATS)} and the 4-bit weights of AWQ and GPTQ can be converted"
        )
        raise unsupported(stored.file.path, f"{shown(stored.name)} {seen}")
    if stored.shape != shape:
        raise stored.bad(f"must have the shape {shape}, not {stored.shape}")


def _missing(checkpoint: Checkpoint, name: str) -> ModelFileError:
    return ModelFileError(
        f"not a complete checkpoint: {shown(str(checkpoint.folder), 300)}: {shown(name)} is missing",
        hint="download the whole checkpoint again",
    )
