"""The op that computes the gated short convolution of LFM2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.plan.builder import PlanBuilder
from llmrun.plan.kv_shapes import ConvolutionShape, LayerKV
from llmrun.plan.ops.base import Op
from llmrun.plan.values import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.plan.twin import Run


@dataclass(frozen=True, slots=True)
class Convolve(Op):
    """An op that computes a gated short convolution.

    x is the concatenation of b, c and y. Each of these has the width given by the shape. The cache stores b * y. The
    output is c times the sum over taps of weight[:, tap] * (b * y at the position of the tap). The last tap is the
    row's own position, and positions before the first one contribute 0. `weight` is float32[width, taps].
    """

    x: Value
    weight: NDArray[np.float32]
    kv: LayerKV
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = convolution_reference(run.values[self.x], self.weight)


class ConvolutionWords(NamedTuple):
    """The op record of `keep` and `convolve`. Only `convolve` has the last four words.

    tables  index of the block tables, the same as the index of their window in the plan
    width   width of a row, padded to a whole number of vectors
    weight  address of float32[taps, width]
    """

    x: int
    x_stride: int
    cache: int
    block_bytes: int
    tables: int
    width: int
    out: int = 0
    out_stride: int = 0
    weight: int = 0
    taps: int = 0


def convolution_reference(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the gated short convolution for all positions of one sequence.

    x is float32[rows, 3 * width] (b, c and y), weight float32[width, taps]. Returns float32[rows, width].
    """
    b, c, y = np.split(x, 3, axis=1)
    width, taps = weight.shape
    kept = np.concatenate([np.zeros((taps - 1, width), np.float32), b * y])
    total = np.zeros_like(y)
    for tap in range(taps):
        total += kept[tap : tap + len(x)] * weight[:, tap]
    result: NDArray[np.float32] = c * total
    return result


class ConvolutionOps(PlanBuilder):
    __slots__ = ()

    def convolve(self, x: Value, weight: NDArray[np.float32]) -> Value:
        """Append a gated short convolution. `weight` is float32[width, taps], and x has 3 * width features."""
        shape = ConvolutionShape(*weight.shape)
        out = x.like(shape.width)
        self.ops.append(Convolve(x, weight, self.next_layer(shape), out))
        return out
