"""Ops that normalize rows: RMSNorm of whole rows or of each head, L2 norm, and LayerNorm."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.twin import Rows, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run


LEAST_SQUARES = 1e-30  # rows whose squares add up to less are not given the length of others


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """An op that computes x / sqrt(mean(x^2) + epsilon) * weight."""

    x: Value
    weight: NDArray[np.float32]
    epsilon: float
    out: Value  # if the rows of `out` are WANTED but those of x are ALL, only the wanted rows of x are read

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = rmsnorm_reference(run.values[self.x], self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """An op that computes (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias."""

    x: Value
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    epsilon: float
    out: Value  # may have fewer rows than x, as in RmsNorm

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = layernorm_reference(run.values[self.x], self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class HeadNorm(Op):
    """An op that applies RMSNorm to each head separately.

    `weight` is float32[head size] if all heads share it, or float32[heads, head size].
    """

    x: Value
    weight: NDArray[np.float32]
    epsilon: float
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        heads = run.heads(self.x, self.weight.shape[-1])
        run.put_parts(self.out, rmsnorm_reference(heads, self.weight, self.epsilon))


@dataclass(frozen=True, slots=True)
class MatchLength(Op):
    """An op that gives each row of x the length of the same row of `like`: out = x * |like| / |x|. Zeros stay zeros."""

    x: Value
    like: Value
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.like)

    def twin(self, run: Run) -> None:
        run.values[self.out] = match_length_reference(run.values[self.x], run.values[self.like])


@dataclass(frozen=True, slots=True)
class CutOff(Op):
    """An op that keeps the parts of features above a cutoff: out = max(x - cutoff, 0).

    The cutoff of a row is its mean plus `deviations` times its standard deviation, an estimate from a sample: the
    squares are divided by the width minus 1.
    """

    x: Value
    deviations: float
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = cut_off_reference(run.values[self.x], self.deviations)


class NormWords(NamedTuple):
    """The op record of `rmsnorm` and `layernorm`.

    epsilon      a float32
    gathers      1 if row i of the output is computed from the i-th wanted row of the input
    heads        number of parts of `width` features that rmsnorm normalizes separately; if there are several parts,
                 `width` must be a whole number of vectors
    weight_step  bytes between the weights of two parts; 0 if all parts share them
    bias         address of the bias of layernorm
    """

    x: int
    x_stride: int
    out: int
    out_stride: int
    weight: int
    width: int
    epsilon: int
    gathers: int
    heads: int
    weight_step: int
    bias: int


class MatchLengthWords(NamedTuple):
    """The op record of `match_length`."""

    x: int
    x_stride: int
    like: int
    like_stride: int
    out: int
    out_stride: int
    width: int


class CutOffWords(NamedTuple):
    """The op record of `cut_off`. `deviations` is a float32."""

    x: int
    x_stride: int
    out: int
    out_stride: int
    width: int
    deviations: int


def rmsnorm_reference(x: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float) -> NDArray[np.float32]:
    """Normalize x float32[..., width] by its root mean square; weight is float32[width] or float32[groups, width].

    Returns an array with the shape of x.
    """
    mean = np.square(x, dtype=np.float32).mean(-1, keepdims=True, dtype=np.float32)
    result: NDArray[np.float32] = x * (np.float32(1) / np.sqrt(mean + np.float32(epsilon))) * weight
    return result


def layernorm_reference(
    x: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32] | None, epsilon: float
) -> NDArray[np.float32]:
    """Normalize x float32[rows, width] by its mean and variance; weight and bias are float32[width].

    Returns an array with the shape of x.
    """
    centred = x - x.mean(-1, keepdims=True, dtype=np.float32)
    result = rmsnorm_reference(centred, weight, epsilon)
    return result if bias is None else result + bias


def match_length_reference(x: NDArray[np.float32], like: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give the rows of x the lengths of those of `like`. Both are float32[rows, width]."""
    ours, theirs = (np.square(value).sum(-1, keepdims=True) for value in (x, like))
    result: NDArray[np.float32] = x * np.sqrt(theirs / np.maximum(ours, np.float32(LEAST_SQUARES)))
    return result


def cut_off_reference(x: NDArray[np.float32], deviations: float) -> NDArray[np.float32]:
    """Keep the parts of float32[rows, width] above the cutoff of each row. See CutOff."""
    mean = x.mean(-1, keepdims=True, dtype=np.float32)
    deviation = np.sqrt(np.square(x - mean).sum(-1, keepdims=True) / np.float32(x.shape[-1] - 1))
    result: NDArray[np.float32] = np.maximum(x - (mean + deviation * np.float32(deviations)), np.float32(0))
    return result


class NormOps(PlanBuilder):
    __slots__ = ()

    def rmsnorm(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        out = x.like(x.width)
        self.ops.append(RmsNorm(x, weight, epsilon, out))
        return out

    def rmsnorm_wanted(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        """Append an RMSNorm of the wanted rows. All later ops process only those rows."""
        out = Value(x.width, Rows.WANTED)
        self.ops.append(RmsNorm(x, weight, epsilon, out))
        return out

    def layernorm(
        self, x: Value, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, epsilon: float
    ) -> Value:
        out = x.like(x.width)
        self.ops.append(LayerNorm(x, weight, bias, epsilon, out))
        return out

    def layernorm_wanted(
        self, x: Value, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, epsilon: float
    ) -> Value:
        out = Value(x.width, Rows.WANTED)
        self.ops.append(LayerNorm(x, weight, bias, epsilon, out))
        return out

    def headnorm(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        """Append an RMSNorm of each head. `weight` is float32[head size] or, per head, float32[heads, head size]."""
        out = x.like(x.width)
        self.ops.append(HeadNorm(x, weight, epsilon, out))
        return out

    def match_length(self, x: Value, like: Value) -> Value:
        """Return x * |like| / |x|, where | | is the length of a row."""
        out = x.like(x.width)
        self.ops.append(MatchLength(x, like, out))
        return out

    def cut_off(self, x: Value, deviations: float) -> Value:
        """Return what exceeds the mean of each row by more than so many standard deviations, and 0 for all others."""
        out = x.like(x.width)
        self.ops.append(CutOff(x, deviations, out))
        return out

    def l2norm(self, x: Value, head_size: int, epsilon: float, scale: float = 1.0) -> Value:
        """Append an L2 norm of each head: scale * x / sqrt(sum(x^2) + epsilon).

        This is an RMSNorm whose weights are all scale / sqrt(head size).
        """
        weight = np.full(head_size, scale / sqrt(head_size), np.float32)
        return self.headnorm(x, weight, epsilon / head_size)
