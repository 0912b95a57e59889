"""Repacks the 4-bit matrices of AWQ and GPTQ as Q4_0 or Q5_0, without rounding.

Both store weight = scale * (q - zero), where q and zero are integers of 4 bits, and a group of inputs shares an f16
scale and a zero point. Q4_0 is scale * (level - 8) and Q5_0 is scale * (level - 16), both in blocks of 32 inputs with
an f16 scale. The blocks of a group repeat its scale:

    every zero point of the matrix is 8   Q4_0 with level = q
    otherwise                             Q5_0 with level = q - zero + 16, from 1 to 31

A matrix of n outputs and m inputs is stored as three tensors. Words are int32, with the first value in the lowest bits:

    qweight  AWQ   [m, n / 8]: a word has 8 outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
             GPTQ  [m / 8, n]: a word has 8 inputs
    qzeros   [groups, n / 8]: a word has 8 outputs, in the same order as in qweight for AWQ, and in order for GPTQ
    scales   [groups, n], f16

GPTQ subtracts 1 from zero points before it stores them, unless the format is gptq_v2. It also stores g_idx [m], the
group of each input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.gguf.problems import shown
from llmrun.formats.quants.fields import sequence
from llmrun.formats.quants.q4 import BLOCK_WEIGHTS, pack_q4_0
from llmrun.formats.quants.q5 import pack_q5_0
from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import WeightType, unsound_halves
from llmrun.jobs.converting.json_objects import unsupported
from llmrun.jobs.converting.quantization import Packing, Quantization
from llmrun.jobs.converting.safetensors import StoredTensor

_WORD = 8  # 4-bit values in a word
_MIDDLE_OF_Q4_0, _MIDDLE_OF_Q5_0 = 8, 16
_LAST_ZERO = 15

# Where in a word AWQ stores the outputs 0 to 7.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])

_PIECE_WEIGHTS = 1 << 22  # weights to unpack at a time, which takes 40 MB


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix whose tensors have been checked. They are read on demand, because a model may not fit in memory.

    group  number of inputs that share a scale and a zero point
    type   Q4_0 or Q5_0
    """

    qweight: StoredTensor
    qzeros: StoredTensor
    scales: StoredTensor
    packing: Packing
    zero_offset: int
    outputs: int
    inputs: int
    group: int
    type: WeightType

    def blocks(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        """Yield the blocks of these outputs, in this order, as uint8[n, block_bytes].

        Raises ModelFileError if the file has changed.
        """
        words = self.qweight.read()
        zeros = _read_zeros(self.qzeros, self.outputs, self.packing) + np.uint8(self.zero_offset)
        scales = self.scales.read().astype(np.float32)
        unpack = _unpack_awq if self.packing is Packing.AWQ else _unpack_gptq
        groups = np.arange(0, self.inputs, BLOCK_WEIGHTS) // self.group  # the group of each block
        step = max(1, _PIECE_WEIGHTS // self.inputs)
        for piece in (rows[first : first + step] for first in range(0, len(rows), step)):
            levels = unpack(words, piece).reshape(len(piece), -1, BLOCK_WEIGHTS)
            block_scales = scales[:, piece][groups].T.reshape(-1, 1)
            if self.type.name == "Q4_0":
                yield pack_q4_0(block_scales, levels.reshape(-1, BLOCK_WEIGHTS))
            else:
                levels = levels + np.uint8(_MIDDLE_OF_Q5_0) - zeros[:, piece][groups].T[..., None]
                yield pack_q5_0(block_scales, levels.reshape(-1, BLOCK_WEIGHTS))


def open_matrix(
    tensors: Mapping[str, StoredTensor], module: str, outputs: int, inputs: int, quantization: Quantization
) -> PackedMatrix:
    """Check the tensors of a module and choose the type of its matrix. Raises ModelFileError and UnsupportedModel."""
    qweight = tensors[f"{module}.qweight"]
    if inputs % BLOCK_WEIGHTS or outputs % _WORD:
        seen = f"has {inputs} inputs and {outputs} outputs, which must be multiples of {BLOCK_WEIGHTS} and {_WORD}"
        raise unsupported(qweight.file.path, f"{shown(module)} {seen}")
    packing, offset = quantization.packing, quantization.zero_offset
    group = quantization.group or inputs
    groups = -(-inputs // group)
    _check(qweight, "I32", (inputs, outputs // _WORD) if packing is Packing.AWQ else (inputs // _WORD, outputs))
    qzeros = _required(tensors, qweight, f"{module}.qzeros", "I32", (groups, outputs // _WORD))
    scales = _required(tensors, qweight, f"{module}.scales", "F16", (groups, outputs))
    if packing is Packing.GPTQ:
        _check_order(tensors, qweight, f"{module}.g_idx", inputs, group, quantization)
    if unsound_halves(scales.read().view(np.uint16)).any():
        raise scales.bad("has a scale that is not finite")
    zeros = _read_zeros(qzeros, outputs, packing)
    if offset and (zeros == _LAST_ZERO).any():
        seen = f"has a stored zero point of {_LAST_ZERO}, which AutoGPTQ reads as 16 and GPTQModel as 0"
        raise unsupported(qzeros.file.path, f"{shown(qzeros.name)} {seen}")
    type_ = BY_NAME["Q4_0" if (zeros == _MIDDLE_OF_Q4_0 - offset).all() else "Q5_0"]
    return PackedMatrix(qweight, qzeros, scales, packing, offset, outputs, inputs, group, type_)


def _read_zeros(qzeros: StoredTensor, outputs: int, packing: Packing) -> NDArray[np.uint8]:
    """Return the stored zero points, uint8[groups, outputs]."""
    return _values_along(qzeros.read(), _places(np.arange(outputs), packing))


def _required(
    tensors: Mapping[str, StoredTensor], beside: StoredTensor, name: str, dtype: str, shape: tuple[int, ...]
) -> StoredTensor:
    if name not in tensors:
        raise beside.bad(f"needs {shown(name)}, which is missing")
    _check(tensors[name], dtype, shape)
    return tensors[name]


def _check(tensor: StoredTensor, dtype: str, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype:
        raise unsupported(tensor.file.path, f"{shown(tensor.name)} is {tensor.dtype}, but must be {dtype}")
    if tensor.shape != shape:
        raise tensor.bad(f"must have the shape {shape}, not {tensor.shape}")


def _check_order(
    tensors: Mapping[str, StoredTensor],
    qweight: StoredTensor,
    name: str,
    inputs: int,
    group: int,
    quantization: Quantization,
) -> None:
    """Check that groups consist of consecutive inputs, because the inputs of a block have only one scale."""
    if name not in tensors:
        if quantization.reordered:
            raise qweight.bad(f"needs {shown(name)}, which is missing, because desc_act is true")
        return
    tensor = _required(tensors, qweight, name, "I32", (inputs,))
    if (tensor.read() != np.arange(inputs) // group).any():
        seen = f"{shown(name)} mixes the inputs of different groups (desc_act), which share no scale in a GGUF file"
        raise unsupported(tensor.file.path, seen, "try a checkpoint that was quantized with desc_act=False")


def _places(outputs: NDArray[np.int64], packing: Packing) -> NDArray[np.int64]:
    """Return where outputs are stored, counted over all words of a row."""
    return outputs // _WORD * _WORD + _AWQ_PLACES[outputs % _WORD] if packing is Packing.AWQ else outputs


def _values_along(words: NDArray[np.int32], places: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Extract values from the words of each row: int32[n, m] -> uint8[n, places]."""
    found: NDArray[np.uint8] = (words[:, places // _WORD] >> (4 * (places % _WORD)) & 15).astype(np.uint8)
    return found


def _unpack_awq(words: NDArray[np.int32], outputs: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the values of some outputs: int32[inputs, n / 8] -> uint8[outputs, inputs]."""
    return _values_along(words, _places(outputs, Packing.AWQ)).T


def _unpack_gptq(words: NDArray[np.int32], outputs: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the values of some outputs: int32[inputs / 8, n] -> uint8[outputs, inputs]."""
    return sequence(np.ascontiguousarray(words[:, outputs].T).view(np.uint8), 4)
