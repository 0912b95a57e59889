"""A plan: the ops that turn tokens into logits, as an architecture writes them down.

An architecture calls the methods of Plan in the order of the model; each appends a logical op and returns the value it
makes. lowering.py turns the list into records for the team; reference.py runs the same list with NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llmrun.kernels.weights import Matrix

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """float32[rows of the step, width], or of the wanted rows only."""

    width: int
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class Embed:
    table: Matrix
    out: Value


@dataclass(frozen=True, slots=True)
class RmsNorm:
    x: Value
    weight: NDArray[np.float32]
    epsilon: float
    out: Value  # wanted while x is not: only the wanted rows are read


@dataclass(frozen=True, slots=True)
class Linear:
    x: Value
    weight: Matrix
    out: Value
    adds: bool  # out += instead of out =


@dataclass(frozen=True, slots=True)
class RopeStore:
    """Rotate queries and keys, put keys and values into the cache."""

    q: Value
    k: Value
    v: Value
    layer: int
    out: Value  # the rotated queries


@dataclass(frozen=True, slots=True)
class Attention:
    q: Value
    layer: int
    out: Value


@dataclass(frozen=True, slots=True)
class SwiGLU:
    gate: Value
    up: Value
    out: Value


Op = Embed | RmsNorm | Linear | RopeStore | Attention | SwiGLU


def matrix_of(op: Op) -> Matrix | None:
    """What an op looks up or multiplies by."""
    match op:
        case Embed():
            return op.table
        case Linear():
            return op.weight
        case _:
            return None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of every layer. Grouped-query attention (GQA): `heads` is a multiple of `kv_heads`."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of pairs (2i, 2i + 1). `frequencies` float64[pairs], radians a position."""

    frequencies: NDArray[np.float64]

    def rotations(self, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32[rows, pairs, 2]: cosine and sine of each row's angles, computed in float64."""
        angles = positions[:, None].astype(np.float64) * self.frequencies
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


@dataclass(slots=True)
class Plan:
    """The ops of one model. `logits` is set by `output` and ends the plan."""

    attention_shape: AttentionShape
    rope: Rope
    ops: list[Op] = field(default_factory=list)
    logits: Value | None = None

    def embed(self, table: Matrix) -> Value:
        out = Value(table.columns)
        self.ops.append(Embed(table, out))
        return out

    def rmsnorm(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        out = Value(x.width, x.wanted)
        self.ops.append(RmsNorm(x, weight, epsilon, out))
        return out

    def rmsnorm_wanted(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        """Normalize only the rows whose logits are asked for; everything after works on those."""
        out = Value(x.width, wanted=True)
        self.ops.append(RmsNorm(x, weight, epsilon, out))
        return out

    def linear(self, x: Value, weight: Matrix) -> Value:
        out = Value(weight.rows, x.wanted)
        self.ops.append(Linear(x, weight, out, adds=False))
        return out

    def linear_add(self, x: Value, weight: Matrix, to: Value) -> None:
        """to += x . weight"""
        self.ops.append(Linear(x, weight, to, adds=True))

    def attention(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Rotate, store and attend."""
        rotated, out = Value(q.width), Value(q.width)
        self.ops.append(RopeStore(q, k, v, layer, rotated))
        self.ops.append(Attention(rotated, layer, out))
        return out

    def swiglu(self, gate: Value, up: Value) -> Value:
        out = Value(gate.width, gate.wanted)
        self.ops.append(SwiGLU(gate, up, out))
        return out

    def output(self, x: Value, weight: Matrix) -> None:
        self.logits = self.linear(x, weight)

    @property
    def matrices(self) -> list[Matrix]:
        """Every matrix that is looked up or multiplied by, once, in order of use."""
        return list({matrix.name: matrix for op in self.ops if (matrix := matrix_of(op))}.values())
