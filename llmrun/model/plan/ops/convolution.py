"""Ops that convolve rows with earlier rows: LFM2's gated short convolution, and the one of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.ops.activations import Activation, activation_reference
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.shapes import ConvolutionShape, ConvolutionState, LayerKV, LayerState
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run

CONVOLVED_FEATURES: Final = 256  # features that a thread convolves at a time


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


@dataclass(frozen=True, slots=True)
class CausalConvolution(Op):
    """An op that computes SiLU(bias + the sum over taps of weight[:, tap] * (x at the position of the tap)).

    The last tap is the row's own position, and taps before the first position contribute 0. `weight` is float32[width,
    taps]. The output is divided into `outs`, whose widths add up to that of x.
    """

    x: Value
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    state: LayerState
    outs: tuple[Value, ...]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        result = causal_convolution_reference(run.values[self.x], self.weight, self.bias)
        ends = np.cumsum([out.width for out in self.outs])
        for out, part in zip(self.outs, np.split(result, ends[:-1], axis=1), strict=True):
            run.values[out] = part


class CausalConvolutionWords(NamedTuple):
    """The op record of `causal_convolution`.

    width        number of features
    weight       address of float32[taps, width]
    bias         address of float32[width]
    state        address of the layer's states, `state_bytes` per sequence
    ring_rows    number of rows in a state
    out          address of the output for the first features
    second       byte offset in a row of the first feature whose output is at `second_out` instead
    third        byte offset in a row of the first feature whose output is at `third_out` instead
    scratch      address of the threads' scratch memory, float32[threads, CONVOLVED_FEATURES]
    """

    x: int
    x_stride: int
    width: int
    weight: int
    bias: int
    taps: int
    state: int
    state_bytes: int
    ring_rows: int
    out: int
    out_stride: int
    second: int
    second_out: int
    second_stride: int
    third: int
    third_out: int
    third_stride: int
    scratch: int


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


def causal_convolution_reference(
    x: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Compute the causal convolution and SiLU for all positions of one sequence.

    x is float32[rows, width], weight float32[width, taps] and bias float32[width]. Returns float32[rows, width].
    """
    width, taps = weight.shape
    padded = np.concatenate([np.zeros((taps - 1, width), np.float32), x])
    total: NDArray[np.float32] = np.zeros_like(x) if bias is None else np.tile(bias, (len(x), 1))
    for tap in range(taps):
        total += padded[tap : tap + len(x)] * weight[:, tap]
    return activation_reference(total, Activation.SILU)


class ConvolutionOps(PlanBuilder):
    __slots__ = ()

    def causal_convolution(
        self, x: Value, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, widths: tuple[int, ...]
    ) -> tuple[Value, ...]:
        """Append a causal convolution with SiLU, and split its output into at most three values of these widths.

        `weight` is float32[width, taps].
        """
        assert sum(widths) == x.width
        assert len(widths) <= 3
        outs = tuple(x.like(width) for width in widths)
        state = self.next_state(ConvolutionState(*weight.shape))
        self.ops.append(CausalConvolution(x, weight, bias, state, outs))
        return outs

    def convolve(self, x: Value, weight: NDArray[np.float32]) -> Value:
        """Append a gated short convolution. `weight` is float32[width, taps], and x has 3 * width features."""
        shape = ConvolutionShape(*weight.shape)
        out = x.like(shape.width)
        self.ops.append(Convolve(x, weight, self.next_layer(shape), out))
        return out
