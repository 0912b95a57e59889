"""A plan: the ops that turn tokens into logits, as an architecture writes them down.

An architecture calls the methods of Plan in the order of the model; each appends an op (ops.py says what it
computes) and returns the value it makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.plan import ops
from llmrun.plan.kv_shapes import AttentionShape, ConvolutionShape, KVGroup, KVShape, Place
from llmrun.plan.ops import Activation, Gating, Routing, Rows, Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.plan.matrix import Matrix
    from llmrun.plan.rope import Rope


@dataclass(slots=True)
class Plan:
    """The ops of one model. `logits` is set by `output`.

    groups  layers that keep something in the KV cache, by the shape of it
    ropes   all rotary positions that layers use
    """

    ops: list[ops.Op] = field(default_factory=list)
    logits: Value | None = None
    groups: list[KVGroup] = field(default_factory=list)
    ropes: list[Rope] = field(default_factory=list)

    # --- whole rows ---

    def embed(self, table: Matrix, scale: float = 1.0) -> Value:
        out = Value(table.columns)
        self.ops.append(ops.Embed(table, scale, out))
        return out

    def rmsnorm(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        out = x.like(x.width)
        self.ops.append(ops.RmsNorm(x, weight, epsilon, out))
        return out

    def rmsnorm_wanted(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        """Normalize only the rows whose logits are asked for; everything after works on those."""
        out = Value(x.width, Rows.WANTED)
        self.ops.append(ops.RmsNorm(x, weight, epsilon, out))
        return out

    def layernorm(
        self, x: Value, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, epsilon: float
    ) -> Value:
        out = x.like(x.width)
        self.ops.append(ops.LayerNorm(x, weight, bias, epsilon, out))
        return out

    def layernorm_wanted(
        self, x: Value, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, epsilon: float
    ) -> Value:
        out = Value(x.width, Rows.WANTED)
        self.ops.append(ops.LayerNorm(x, weight, bias, epsilon, out))
        return out

    def headnorm(self, x: Value, weight: NDArray[np.float32], epsilon: float) -> Value:
        """Normalize each head for itself; `weight` float32[head size] is that of all."""
        out = x.like(x.width)
        self.ops.append(ops.HeadNorm(x, weight, epsilon, out))
        return out

    def bias(self, x: Value, bias: NDArray[np.float32]) -> Value:
        out = x.like(x.width)
        self.ops.append(ops.Bias(x, bias, out))
        return out

    def add(self, y: Value, to: Value, scale: float = 1.0) -> None:
        """to += scale * y"""
        self.ops.append(ops.Add(y, scale, to))

    def add_gated(self, y: Value, gate: Value, to: Value) -> None:
        """to += sigmoid(gate) * y; `gate` has one feature"""
        self.ops.append(ops.AddGated(y, gate, to))

    def scale(self, x: Value, factor: float) -> None:
        """x *= factor"""
        self.ops.append(ops.Scale(x, factor))

    def columns(self, x: Value, first: int, width: int, groups: int = 1) -> Value:
        """`width` features from `first` on, of each of `groups` equal parts of x."""
        out = x.like(width * groups)
        self.ops.append(ops.Columns(x, groups, first, out))
        return out

    def join(self, a: Value, b: Value, groups: int = 1) -> Value:
        """What a and b have of each of `groups` parts, side by side."""
        return self._join(a, b, groups, a.width + b.width)

    def join_to_each(self, a: Value, b: Value, groups: int) -> Value:
        """All of a, then what b has of each of `groups` parts."""
        return self._join(a, b, groups, a.width * groups + b.width)

    def _join(self, a: Value, b: Value, groups: int, width: int) -> Value:
        out = b.like(width)
        self.ops.append(ops.Join(a, b, groups, out))
        return out

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        out = gate.like(gate.width)
        self.ops.append(ops.Gated(gate, up, activation, out))
        return out

    def swiglu(self, gate: Value, up: Value) -> Value:
        return self.gated(gate, up, Activation.SILU)

    def activate(self, x: Value, activation: Activation) -> Value:
        out = x.like(x.width)
        self.ops.append(ops.Activate(x, activation, out))
        return out

    # --- matrices ---

    def linear(self, x: Value, weight: Matrix) -> Value:
        out = x.like(weight.rows)
        self.ops.append(ops.Linear(x, weight, out, adds=False))
        return out

    def linear_add(self, x: Value, weight: Matrix, to: Value) -> None:
        """to += x . weight"""
        self.ops.append(ops.Linear(x, weight, to, adds=True))

    def head_linear(self, x: Value, weight: Matrix, heads: int) -> Value:
        """Each of `heads` parts of x times its own rows of `weight`, float[heads * out, width of a part]."""
        out = x.like(weight.rows)
        self.ops.append(ops.HeadLinear(x, weight, heads, out))
        return out

    def output(self, x: Value, weight: Matrix) -> None:
        self.logits = self.linear(x, weight)

    def soft_cap_logits(self, cap: float) -> None:
        assert self.logits is not None
        self.ops.append(ops.SoftCap(self.logits, cap))

    # --- what looks back ---

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        shape: AttentionShape,
        rope: Rope | None,
        *,
        query_rope: Rope | None = None,
        scale: float | None = None,
        soft_cap: float = 0.0,
        sinks: NDArray[np.float32] | None = None,
    ) -> Value:
        """Rotate, store and attend. `query_rope` None: queries are rotated as keys; `scale` None: 1 / sqrt(head
        size)."""
        place, rotated = self._place(shape), Value(q.width)
        numbers = self._number(query_rope or rope), self._number(rope)
        self.ops.append(ops.RopeStore(q, k, v, place, *numbers, rotated))
        return self._attend(rotated, place, scale, soft_cap, sinks)

    def attention_again(
        self, q: Value, shape: AttentionShape, rope: Rope | None, *, scale: float | None = None
    ) -> Value:
        """Rotate, and attend to what the last layer of that shape has stored."""
        [number] = [number for number, group in enumerate(self.groups) if group.shape == shape]
        place, rotated = Place(shape, number, self.groups[number].layers - 1), Value(q.width)
        self.ops.append(ops.Rotate(q, place, self._number(rope), rotated))
        return self._attend(rotated, place, scale, soft_cap=0.0, sinks=None)

    def _attend(
        self, q: Value, place: Place, scale: float | None, soft_cap: float, sinks: NDArray[np.float32] | None
    ) -> Value:
        shape = place.shape
        assert isinstance(shape, AttentionShape)
        out = Value(shape.heads * shape.value_size)
        scale = shape.head_size**-0.5 if scale is None else scale
        self.ops.append(ops.Attention(q, place, scale, soft_cap, sinks, out))
        return out

    def convolve(self, x: Value, weight: NDArray[np.float32]) -> Value:
        """A gated short convolution; `weight` float32[width, taps], x of three times the width."""
        shape = ConvolutionShape(*weight.shape)
        out = x.like(shape.width)
        self.ops.append(ops.Convolve(x, weight, self._place(shape), out))
        return out

    def _place(self, shape: KVShape) -> Place:
        """The next layer of that shape."""
        shapes = [group.shape for group in self.groups]
        if shape not in shapes:
            shapes.append(shape)
            self.groups.append(KVGroup(shape))
        number = shapes.index(shape)
        self.groups[number].layers += 1
        return Place(shape, number, self.groups[number].layers - 1)

    def _number(self, rope: Rope | None) -> int | None:
        if rope is None:
            return None
        for number, known in enumerate(self.ropes):
            if known is rope:
                return number
        self.ropes.append(rope)
        return len(self.ropes) - 1

    # --- experts ---

    def route(
        self,
        logits: Value,
        used: int,
        gating: Gating,
        *,
        normalized: bool,
        scale: float = 1.0,
        selection_bias: NDArray[np.float32] | None = None,
        expert_scales: NDArray[np.float32] | None = None,
    ) -> Routing:
        """Choose `used` experts for each row."""
        routing = Routing(logits.width, used)
        self.ops.append(ops.Route(logits, gating, normalized, scale, selection_bias, expert_scales, routing))
        return routing

    def expert_linear(self, x: Value, weight: Matrix, routing: Routing) -> Value:
        """Each row times the matrices of its experts; `weight` has all experts' one after the other."""
        out = Value(weight.rows // routing.experts, Rows.CHOSEN, routing.used)
        self.ops.append(ops.ExpertLinear(x, weight, routing, out))
        return out

    def expert_bias(self, x: Value, bias: NDArray[np.float32], routing: Routing) -> Value:
        out = x.like(x.width)
        self.ops.append(ops.ExpertBias(x, bias, routing, out))
        return out

    def combine(self, y: Value, routing: Routing, to: Value) -> None:
        """to += what the experts of a row made, weighted"""
        self.ops.append(ops.Combine(y, routing, to, adds=True))

    def combined(self, y: Value, routing: Routing) -> Value:
        """What the experts of a row made, weighted: a value of its own."""
        out = Value(y.width)
        self.ops.append(ops.Combine(y, routing, out, adds=False))
        return out

    # --- what it is made of ---

    @property
    def matrices(self) -> list[Matrix]:
        """Every matrix that is looked up or multiplied by, once, in order of use."""
        return list({matrix.name: matrix for op in self.ops if (matrix := ops.matrix_of(op))}.values())

    @property
    def windows(self) -> list[int]:
        """The distinct windows of the groups: each has its own block table. 0: everything is kept."""
        return list(dict.fromkeys(group.shape.window for group in self.groups))

    @property
    def experts_used(self) -> int:
        """Rows of a CHOSEN value for each row of the step; 1 where no op chooses."""
        return next((op.routing.used for op in self.ops if isinstance(op, ops.Route)), 1)
