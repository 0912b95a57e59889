"""The ops of a plan, and what passes between them.

lower.py turns them into records for the team; reference.py says in NumPy what each of them means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from llmrun.plan.kv_shapes import Place
from llmrun.plan.matrix import Matrix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Rows(StrEnum):
    """The rows a value has."""

    ALL = "all"  # of the step
    WANTED = "wanted"  # those whose logits are asked for
    CHOSEN = "chosen"  # one for each expert that a row of the step is sent to


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """float32[rows, width]. `copies`: experts that each row of the step is sent to, where rows are CHOSEN."""

    width: int
    rows: Rows = Rows.ALL
    copies: int = 1

    def like(self, width: int) -> Value:
        """Another value of the same rows."""
        return Value(width, self.rows, self.copies)


# --- ops --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Embed:
    table: Matrix
    scale: float
    out: Value


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight"""

    x: Value
    weight: NDArray[np.float32]
    epsilon: float
    out: Value  # WANTED while x is not: only the wanted rows are read


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias"""

    x: Value
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    epsilon: float
    out: Value  # as RmsNorm's


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RmsNorm of each head for itself; `weight` float32[head size]."""

    x: Value
    weight: NDArray[np.float32]
    epsilon: float
    out: Value


@dataclass(frozen=True, slots=True)
class Linear:
    x: Value
    weight: Matrix
    out: Value
    adds: bool  # out += instead of out =


@dataclass(frozen=True, slots=True)
class Bias:
    """x + bias; `bias` float32[width]."""

    x: Value
    bias: NDArray[np.float32]
    out: Value


@dataclass(frozen=True, slots=True)
class Add:
    """out += scale * y"""

    y: Value
    scale: float
    out: Value


@dataclass(frozen=True, slots=True)
class AddGated:
    """out += sigmoid(gate) * y; `gate` has one feature."""

    y: Value
    gate: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Scale:
    """x *= factor, in place"""

    x: Value
    factor: float


@dataclass(frozen=True, slots=True)
class Columns:
    """Some features of each of `groups` equal parts of a row: those from `first` on, as many as `out` has of each."""

    x: Value
    groups: int
    first: int
    out: Value


@dataclass(frozen=True, slots=True)
class Join:
    """Rows of `groups` parts: what a has of a part, then what b has of it. Where a has one part alone, that stands in
    all of them."""

    a: Value
    b: Value
    groups: int
    out: Value


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """Each of `heads` equal parts of a row times a matrix of its own; `weight` has the heads' matrices one after the
    other."""

    x: Value
    weight: Matrix
    heads: int
    out: Value


@dataclass(frozen=True, slots=True)
class RopeStore:
    """Rotate queries and keys, put keys and values into the cache."""

    q: Value
    k: Value
    v: Value
    place: Place
    query_rope: int | None  # which of the plan's ropes; None: nothing is rotated
    key_rope: int | None  # of the same pairs as the queries'
    out: Value  # the rotated queries


@dataclass(frozen=True, slots=True)
class Rotate:
    """Rotate queries of a layer that looks back on what another layer has put into the cache."""

    q: Value
    place: Place
    rope: int | None
    out: Value


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax over the scores of the positions a row sees, weighted values.

    scale     what products of queries and keys are multiplied by
    soft_cap  scores are cap * tanh(score / cap); 0: as they are
    sinks     float32[heads]: a score more for each head, which takes its share of the weights and has no value
    """

    q: Value
    place: Place
    scale: float
    soft_cap: float
    sinks: NDArray[np.float32] | None
    out: Value


class Activation(StrEnum):
    SILU = "silu"  # x / (1 + exp(-x))
    GELU = "gelu"  # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    # gpt-oss: the gate at most 7, up within 7 of 0: gate / (1 + exp(-1.702 gate)) * (up + 1)
    CLAMPED_SILU = "clamped silu"


@dataclass(frozen=True, slots=True)
class Gated:
    """activation(gate) * up"""

    gate: Value
    up: Value
    activation: Activation
    out: Value


@dataclass(frozen=True, slots=True)
class Activate:
    """activation(x): SILU or GELU"""

    x: Value
    activation: Activation
    out: Value


@dataclass(frozen=True, slots=True)
class Convolve:
    """A gated short convolution. x is (b, c, y), each of the shape's width; the cache keeps b * y; out is c times the
    sum over taps of weight[:, tap] * (b * y at that position), the row's own position last. `weight` float32[width,
    taps]; before the first position is 0."""

    x: Value
    weight: NDArray[np.float32]
    place: Place
    out: Value


class Gating(StrEnum):
    """From a router's logits to the experts' weights."""

    SOFTMAX = "softmax"  # of all logits
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax of chosen"  # chosen by logits, weights are the softmax of theirs


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which `used` of `experts` each row is sent to, in order of their probability, and with what weight."""

    experts: int
    used: int


@dataclass(frozen=True, slots=True)
class Route:
    """The `used` experts of the largest probability (that of a lower number first where two are equal).

    normalized      their weights are divided by their sum (no less than 2^-14)
    scale           the weights are multiplied by, after that
    selection_bias  float32[experts], added for choosing only
    expert_scales   float32[experts]: what the weight of each is multiplied by, last
    """

    logits: Value
    gating: Gating
    normalized: bool
    scale: float
    selection_bias: NDArray[np.float32] | None
    expert_scales: NDArray[np.float32] | None
    routing: Routing


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """Each chosen row times the matrix of its expert. `weight` has the experts' matrices one after the other; x of ALL
    rows: each row once for each of its experts."""

    x: Value
    weight: Matrix
    routing: Routing
    out: Value  # CHOSEN


@dataclass(frozen=True, slots=True)
class ExpertBias:
    """x + the bias of its expert; `bias` float32[experts, width]."""

    x: Value
    bias: NDArray[np.float32]
    routing: Routing
    out: Value


@dataclass(frozen=True, slots=True)
class Combine:
    """The sum over a row's experts, in their order, of weight * y."""

    y: Value  # CHOSEN
    routing: Routing
    out: Value
    adds: bool  # out += instead of out =


@dataclass(frozen=True, slots=True)
class SoftCap:
    """x = cap * tanh(x / cap), in place"""

    x: Value
    cap: float


Op = (
    Embed
    | RmsNorm
    | LayerNorm
    | HeadNorm
    | Linear
    | Bias
    | Add
    | AddGated
    | Scale
    | Columns
    | Join
    | HeadLinear
    | RopeStore
    | Rotate
    | Attention
    | Gated
    | Activate
    | Convolve
    | Route
    | ExpertLinear
    | ExpertBias
    | Combine
    | SoftCap
)


Product = Linear | HeadLinear | ExpertLinear  # what multiplies by a matrix


def matrix_of(op: Op) -> Matrix | None:
    """What an op looks up or multiplies by."""
    match op:
        case Embed():
            return op.table
        case Linear() | HeadLinear() | ExpertLinear():
            return op.weight
        case _:
            return None


def routing_of(op: Op) -> Routing | None:
    """Of an op that has to do with experts."""
    match op:
        case Route() | ExpertLinear() | ExpertBias() | Combine():
            return op.routing
        case _:
            return None


def sum_of(op: Op) -> Value | None:
    """The value that an op changes: what it adds onto."""
    match op:
        case Add() | AddGated():
            return op.out
        case Scale():
            return op.x
        case Linear() | Combine():
            return op.out if op.adds else None
        case _:
            return None


def inputs_of(op: Op) -> list[Value]:
    """The values an op reads, those that it adds onto among them."""
    match op:
        case Embed():
            return []
        case Linear():
            return [op.x, op.out] if op.adds else [op.x]
        case RopeStore():
            return [op.q, op.k, op.v]
        case Rotate() | Attention():
            return [op.q]
        case Join():
            return [op.a, op.b]
        case Gated():
            return [op.gate, op.up]
        case Combine():
            return [op.y, op.out] if op.adds else [op.y]
        case Add():
            return [op.y, op.out]
        case AddGated():
            return [op.y, op.gate, op.out]
        case Route():
            return [op.logits]
        case _:
            return [op.x]
