"""Packs 4-bit weights as AWQ and GPTQ do, and computes weights with the formulas of their own libraries.

The packers and the formulas do not share code with llmrun. With random weights, the formulas give the same bits as the
code of AutoAWQ 0.2.9, AutoGPTQ 0.7.1 and GPTQModel 7.7.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, tuple[str, NDArray[np.generic]]]

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs in a word of AWQ, from its lowest bits
AWQ_REVERSE_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Quantized:
    """Random 4-bit weights: q uint8[outputs, inputs], zeros uint8[groups, outputs], scales float16[groups, outputs]."""

    q: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float16]
    group: int

    @classmethod
    def random(
        cls, random: np.random.Generator, outputs: int, inputs: int, group: int, *, zero: int | None = None
    ) -> Quantized:
        """Return random weights. `zero` is the zero point of all groups, or None for random ones from 1 to 15."""
        groups = -(-inputs // group)
        q = random.integers(0, 16, (outputs, inputs), dtype=np.uint8)
        zeros = random.integers(1, 16, (groups, outputs), dtype=np.uint8)
        if zero is not None:
            zeros[:] = zero
        scales = (random.uniform(0.2, 1, (groups, outputs)) / (4 * np.sqrt(inputs))).astype(np.float16)
        return cls(q, zeros, scales, group)

    def weights(self) -> NDArray[np.float32]:
        """Compute the weights without rounding, as float32[outputs, inputs]."""
        groups = np.arange(self.q.shape[1]) // self.group
        difference = self.q.astype(np.float32) - self.zeros[groups].T.astype(np.float32)
        return difference * self.scales[groups].T.astype(np.float32)

    def awq(self, module: str) -> Tensors:
        """Return the tensors of AutoAWQ (`WQLinear_GEMM.from_linear`)."""
        return {
            f"{module}.qweight": ("I32", _pack_rows(self.q.T, AWQ_ORDER)),
            f"{module}.qzeros": ("I32", _pack_rows(self.zeros, AWQ_ORDER)),
            f"{module}.scales": ("F16", self.scales),
        }

    def gptq(self, module: str, *, version: int = 1) -> Tensors:
        """Return the tensors of AutoGPTQ (`QuantLinear.pack`). Version 1 subtracts 1 from the zero points."""
        inputs = self.q.shape[1]
        return {
            f"{module}.qweight": ("I32", np.ascontiguousarray(_pack_rows(self.q, range(8)).T)),
            f"{module}.qzeros": ("I32", _pack_rows(self.zeros - np.uint8(version == 1), range(8))),
            f"{module}.scales": ("F16", self.scales),
            f"{module}.g_idx": ("I32", (np.arange(inputs) // self.group).astype(np.int32)),
        }


def _pack_rows(values: NDArray[np.uint8], order: range | list[int]) -> NDArray[np.int32]:
    """Pack eight values of each row into a word: uint8[n, 8 m] -> int32[n, m]. `order` begins at the lowest bits."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for place, index in enumerate(order):
        words |= values[:, index::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def awq_weights(
    qweight: NDArray[np.int32], qzeros: NDArray[np.int32], scales: NDArray[np.float16], group: int
) -> NDArray[np.float16]:
    """Compute float16[inputs, outputs] as AutoAWQ does (`awq/utils/packing_utils.py`, `dequantize_gemm`)."""
    shifts = np.arange(0, 32, 4)

    def unpacked(words: NDArray[np.int32]) -> NDArray[np.int8]:
        values = (words[:, :, None] >> shifts[None, None, :]).astype(np.int8).reshape(words.shape[0], -1)
        order = np.arange(values.shape[-1]).reshape(-1, 8)[:, AWQ_REVERSE_ORDER].reshape(-1)
        return values[:, order] & np.int8(15)

    zeros = unpacked(qzeros).repeat(group, axis=0)
    difference = unpacked(qweight) - zeros
    weights: NDArray[np.float16] = difference.astype(np.float16) * scales.repeat(group, axis=0)
    return weights


def gptq_weights(
    qweight: NDArray[np.int32],
    qzeros: NDArray[np.int32],
    scales: NDArray[np.float16],
    g_idx: NDArray[np.int32],
    *,
    version: int = 1,
) -> NDArray[np.float16]:
    """Compute float16[inputs, outputs] as AutoGPTQ and GPTQModel do (`QuantLinear.forward`, `dequantize_weight`)."""
    shifts = np.arange(0, 32, 4)
    zeros = (qzeros[:, :, None] >> shifts[None, None, :]).astype(np.int8) & np.int8(15)
    zeros = zeros.reshape(scales.shape) + np.int8(version == 1)
    values = (qweight[:, None, :] >> shifts[None, :, None]).astype(np.int8) & np.int8(15)
    values = values.reshape(-1, qweight.shape[1])
    weights: NDArray[np.float16] = scales[g_idx] * (values - zeros[g_idx]).astype(np.float16)
    return weights
