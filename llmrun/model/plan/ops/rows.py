"""Element-wise ops on rows, ops that slice or concatenate rows, and the soft cap on logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.elementary import sigmoid_reference, soft_cap_reference
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run


@dataclass(frozen=True, slots=True)
class Bias(Op):
    """An op that computes x + bias. `bias` is float32[width]."""

    x: Value
    bias: NDArray[np.float32]
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = run.values[self.x] + self.bias


@dataclass(frozen=True, slots=True)
class Add(Op):
    """An op that computes out += scale * y."""

    y: Value
    scale: float
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.y, self.out)

    @property
    def changes(self) -> Value:
        return self.out

    def twin(self, run: Run) -> None:
        run.values[self.out] = run.values[self.out] + np.float32(self.scale) * run.values[self.y]


@dataclass(frozen=True, slots=True)
class AddGated(Op):
    """An op that computes out += sigmoid(gate) * y. `gate` has one feature per row."""

    y: Value
    gate: Value
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.y, self.gate, self.out)

    @property
    def changes(self) -> Value:
        return self.out

    def twin(self, run: Run) -> None:
        factor = sigmoid_reference(run.values[self.gate])
        run.values[self.out] = run.values[self.out] + factor * run.values[self.y]


@dataclass(frozen=True, slots=True)
class AddWeighted(Op):
    """An op that computes out = x + (offset + factor) * y, where feature `at` of `factors` is the factor of a row.

    If `out` is x, the op changes it in place.
    """

    x: Value
    y: Value
    factors: Value
    at: int
    offset: float
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.y, self.factors)

    @property
    def changes(self) -> Value | None:
        return self.out if self.out is self.x else None

    def twin(self, run: Run) -> None:
        factor = run.values[self.factors][:, self.at : self.at + 1] + np.float32(self.offset)
        run.values[self.out] = run.values[self.x] + factor * run.values[self.y]


@dataclass(frozen=True, slots=True)
class Multiply(Op):
    """An op that computes x * weight. `weight` is float32[width]."""

    x: Value
    weight: NDArray[np.float32]
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = run.values[self.x] * self.weight


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """An op that computes x *= factor in place."""

    x: Value
    factor: float

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    @property
    def changes(self) -> Value:
        return self.x

    def twin(self, run: Run) -> None:
        run.values[self.x] = run.values[self.x] * np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class Clamp(Op):
    """An op that computes min(max(x, least), most). NaN stays NaN."""

    x: Value
    least: float
    most: float
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = np.clip(run.values[self.x], np.float32(self.least), np.float32(self.most))


class ClampWords(NamedTuple):
    """The op record of `clamp`. `least` and `most` are float32."""

    x: int
    x_stride: int
    out: int
    out_stride: int
    width: int
    least: int
    most: int


class AddWords(NamedTuple):
    """The op record of `add`, which computes out = x + factor * y.

    `factor` is a float32. If `gate` (an address) is not 0, the sigmoid of the row's gate replaces the factor, or, if
    `is_plain` is 1, the gate itself is added to it. The gate is `gate_at` bytes from the start of a row.
    """

    out: int
    out_stride: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    width: int
    factor: int
    gate: int
    gate_stride: int
    gate_at: int = 0
    is_plain: int = 0


@dataclass(frozen=True, slots=True)
class Slice(Op):
    """An op that splits each row into `groups` equal parts and takes a slice of each part, starting at `first`.

    The width of `out` determines the width of the slices.
    """

    x: Value
    groups: int
    first: int
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        parts = run.parts(self.x, self.groups)
        run.put_parts(self.out, parts[:, :, self.first : self.first + self.out.width // self.groups])


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """An op that splits the rows of a and b into `groups` equal parts and concatenates the corresponding parts.

    If a has only one part, it is broadcast to all parts of b.
    """

    a: Value
    b: Value
    groups: int
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.a, self.b)

    def twin(self, run: Run) -> None:
        b = run.parts(self.b, self.groups)
        width = self.out.width // self.groups - b.shape[2]
        a = np.broadcast_to(run.parts(self.a, self.a.width // width), (*b.shape[:2], width))
        run.put_parts(self.out, np.concatenate([a, b], axis=2))


class ConcatWords(NamedTuple):
    """The op record of `concat`.

    Each of the `parts` parts of a row consists of `a_bytes` bytes of a followed by `b_bytes` bytes of b. The source
    pointers advance by `a_step` and `b_step` bytes per part.
    """

    a: int
    a_stride: int
    a_step: int
    a_bytes: int
    b: int
    b_stride: int
    b_step: int
    b_bytes: int
    out: int
    out_stride: int
    parts: int


class RowOps(PlanBuilder):
    __slots__ = ()

    def bias(self, x: Value, bias: NDArray[np.float32]) -> Value:
        out = x.like(x.width)
        self.ops.append(Bias(x, bias, out))
        return out

    def add(self, y: Value, to: Value, scale: float = 1.0) -> None:
        """Append an op that computes to += scale * y."""
        self.ops.append(Add(y, scale, to))

    def add_gated(self, y: Value, gate: Value, to: Value) -> None:
        """Append an op that computes to += sigmoid(gate) * y. `gate` has one feature per row."""
        self.ops.append(AddGated(y, gate, to))

    def plus_weighted(self, x: Value, y: Value, factors: Value, at: int) -> Value:
        """Return x + factor * y as a new value, where feature `at` of `factors` is the factor of a row."""
        out = x.like(x.width)
        self.ops.append(AddWeighted(x, y, factors, at, 0.0, out))
        return out

    def add_weighted(self, y: Value, factors: Value, at: int, to: Value, offset: float = 0.0) -> None:
        """Append an op that computes to += (offset + factor) * y. See `plus_weighted`."""
        self.ops.append(AddWeighted(to, y, factors, at, offset, to))

    def multiply(self, x: Value, weight: NDArray[np.float32]) -> Value:
        """Return x * weight. `weight` is float32[width]."""
        out = x.like(x.width)
        self.ops.append(Multiply(x, weight, out))
        return out

    def scale(self, x: Value, factor: float) -> None:
        """Append an op that computes x *= factor in place."""
        self.ops.append(Scale(x, factor))

    def clamp(self, x: Value, least: float, most: float) -> Value:
        """Return min(max(x, least), most). `least` must be at most 0 and `most` at least 0."""
        out = x.like(x.width)
        self.ops.append(Clamp(x, least, most, out))
        return out

    def slice(self, x: Value, first: int, width: int, groups: int = 1) -> Value:
        """Take `width` features of each of `groups` equal parts of x, starting at feature `first` of each part."""
        out = x.like(width * groups)
        self.ops.append(Slice(x, groups, first, out))
        return out

    def concat(self, a: Value, b: Value, groups: int = 1) -> Value:
        """Concatenate each of `groups` equal parts of a with the corresponding part of b."""
        return self._concat(a, b, groups, a.width + b.width)

    def concat_to_each(self, a: Value, b: Value, groups: int) -> Value:
        """Concatenate the whole row of a with each of `groups` equal parts of b."""
        return self._concat(a, b, groups, a.width * groups + b.width)

    def _concat(self, a: Value, b: Value, groups: int, width: int) -> Value:
        out = b.like(width)
        self.ops.append(Concat(a, b, groups, out))
        return out


@dataclass(frozen=True, slots=True)
class SoftCap(Op):
    """An op that computes x = cap * tanh(x / cap) in place on the logits x."""

    x: Value
    cap: float

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    @property
    def changes(self) -> Value:
        return self.x

    def twin(self, run: Run) -> None:
        run.values[self.x] = soft_cap_reference(run.values[self.x], self.cap)


class SoftCapWords(NamedTuple):
    """The op record of `soft_cap`. Each step provides the address of the logits. `cap` is a float32."""

    stride: int
    width: int
    cap: int


class LogitsOps(PlanBuilder):
    __slots__ = ()

    def soft_cap_logits(self, cap: float) -> None:
        assert self.logits is not None
        self.ops.append(SoftCap(self.logits, cap))
