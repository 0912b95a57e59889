"""Ops that compute matrix products, and the quantization of their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.twin import Rows, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run

PARTIALS = 4  # number of partial sums in a product with float weights


class Product(Op):
    """An op that multiplies rows of `x` by `weight`."""

    __slots__ = ()

    x: Value
    weight: Matrix
    out: Value

    @property
    def matrix(self) -> Matrix:
        return self.weight


@dataclass(frozen=True, slots=True)
class Linear(Product):
    """An op that computes out = x . weight, or out += x . weight if `adds`.

    If `out` is narrower than the matrix has rows, only the first outputs are computed.
    """

    x: Value
    weight: Matrix
    out: Value
    adds: bool

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.out) if self.adds else (self.x,)

    @property
    def changes(self) -> Value | None:
        return self.out if self.adds else None

    def twin(self, run: Run) -> None:
        product = run.multiply(self.weight, run.values[self.x])[:, : self.out.width]
        run.values[self.out] = run.values[self.out] + product if self.adds else product


@dataclass(frozen=True, slots=True)
class HeadLinear(Product):
    """An op that multiplies each of `heads` equal parts of a row by its own matrix.

    `weight` contains these matrices, one after the other.
    """

    x: Value
    weight: Matrix
    heads: int
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        parts, rows = run.parts(self.x, self.heads), self.weight.rows // self.heads
        products = [run.multiply(self.weight.part(h * rows, rows), parts[:, h]) for h in range(self.heads)]
        run.values[self.out] = np.concatenate(products, axis=1)


class QuantizeWords(NamedTuple):
    """The op record of `quantize`. The rows at `out` have the layout described in layouts/linear.py."""

    x: int
    x_stride: int
    out: int
    out_stride: int
    blocks: int


class IntegerWords(NamedTuple):
    """The op record of matrix products with integer weights, `linear` and `experts`.

    Only `experts` has the words from `tables` to the end.

    groups       number of groups of 16 outputs in the matrix, or in one expert's matrix
    x            address of the quantized rows (layouts/linear.py)
    chunk        number of groups that a thread claims at a time
    adds         1 to compute out += product, 0 to compute out = product
    logits       1 if the step provides the address of the output
    panels       address of the memory for unpacked weights, `panels_stride` bytes per thread
    tables       address of the routing's tables, `tables_bytes` per thread
    row_numbers  address of int32[slots]: the index of the row of x for each slot
    own_rows     1 if x has a row for each slot
    """

    weights: int
    groups: int
    blocks: int
    group_bytes: int
    x: int
    x_stride: int
    out: int
    out_stride: int
    adds: int
    chunk: int
    logits: int
    panels: int
    panels_stride: int
    tables: int = 0
    tables_bytes: int = 0
    row_numbers: int = 0
    own_rows: int = 0


class FloatWords(NamedTuple):
    """The op record of matrix products with float weights.

    The words have the same meaning as in IntegerWords. `columns` is padded to a multiple of 4.
    """

    weights: int
    groups: int
    columns: int
    group_bytes: int
    x: int
    x_stride: int
    out: int
    out_stride: int
    adds: int
    chunk: int
    logits: int
    tables: int = 0
    tables_bytes: int = 0
    row_numbers: int = 0
    own_rows: int = 0


def quantize_reference(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize x float32[rows, width] in blocks of 32, where width is a multiple of 32.

    Returns int8[rows, blocks, 32] and scales float32[rows, blocks].
    """
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1)
    alive = largest > np.float32(1e-36)
    inverse = np.where(alive, np.float32(127) / np.where(alive, largest, np.float32(1)), np.float32(0))
    integers = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return integers, np.where(alive, largest / np.float32(127), np.float32(0)).astype(np.float32)


def integer_linear_reference(
    integers: NDArray[np.int8],
    scales: NDArray[np.float32],
    mins: NDArray[np.float32] | None,
    x: NDArray[np.int8],
    x_scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Multiply by integer weights.

    integers  int8[n, blocks, 32], with the zero point subtracted
    scales    float32[n, blocks, 1 or 2], one per block or per half block; `mins` likewise
    x         int8[rows, blocks, 32]
    x_scales  float32[rows, blocks]

    Returns float32[rows, n]. Integers are exact, and floats are rounded in the same places as in the kernel.
    """
    sub_blocks = scales.shape[2]
    halves = (-1, sub_blocks, 32 // sub_blocks)
    weights, activations = (array.reshape(*array.shape[:1], *halves).astype(np.int32) for array in (integers, x))
    x_sums = activations.sum(-1).astype(np.float32) * x_scales[..., None]
    y = np.zeros((len(x), len(integers)), np.float32)
    for block in range(integers.shape[1]):
        dots = np.einsum("nsk,rsk->srn", weights[:, block], activations[:, block]).astype(np.float32)
        if sub_blocks == 1:
            y = _fused(dots[0], scales[None, :, block, 0] * x_scales[:, block, None], y)
        else:
            both = _fused(dots[1], scales[None, :, block, 1], dots[0] * scales[None, :, block, 0])
            y = _fused(both, x_scales[:, block, None], y)
        for sub in range(sub_blocks if mins is not None else 0):
            assert mins is not None
            y = _fused(mins[None, :, block, sub], x_sums[:, block, sub, None], y)
    return y


def float_linear_reference(weights: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply x float32[rows, k] by float weights float32[n, k].

    Returns float32[rows, n]. Floats are rounded in the same places as in the kernel.
    """
    partial = np.zeros((PARTIALS, len(x), len(weights)), np.float32)
    for column in range(x.shape[1]):
        place = column % PARTIALS
        partial[place] = _fused(weights[None, :, column], x[:, None, column], partial[place])
    result: NDArray[np.float32] = (partial[0] + partial[1]) + (partial[2] + partial[3])
    return result


def _fused(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a * b + c, rounded once. The sum is computed in float64, which is wrong for one sum in 2^29."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


class LinearOps(PlanBuilder):
    __slots__ = ()

    def linear(self, x: Value, weight: Matrix) -> Value:
        out = x.like(weight.rows)
        self.ops.append(Linear(x, weight, out, adds=False))
        return out

    def linear_add(self, x: Value, weight: Matrix, to: Value) -> None:
        """Append an op that adds x . weight to `to`."""
        self.ops.append(Linear(x, weight, to, adds=True))

    def head_linear(self, x: Value, weight: Matrix, heads: int) -> Value:
        """Append an op that multiplies each of `heads` equal parts of x by its own matrix.

        `weight` contains the matrices of all heads and has the shape [heads * out, part width].
        """
        out = x.like(weight.rows)
        self.ops.append(HeadLinear(x, weight, heads, out))
        return out

    def output(self, x: Value, weight: Matrix, tokens: int | None = None) -> None:
        """Append the op that computes the logits, or only those of the first `tokens` tokens."""
        self.logits = Value(tokens or weight.rows, Rows.SCORED)
        self.ops.append(Linear(x, weight, self.logits, adds=False))
