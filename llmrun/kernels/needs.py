"""What each op of a plan has to read and to multiply: the work that a profile or a roofline holds its time against."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmrun.kernels import plan as ops
from llmrun.kernels.kv_layout import BLOCK, HeadLayout
from llmrun.kernels.packed_types import GROUP_ROWS
from llmrun.kernels.weights import PackedLayout

_FLOAT = 4
# Of 32 numbers as int8: themselves, scale, offset, sum and two half sums (quantize.py).
_QUANTIZED_BLOCK = 32 + 5 * _FLOAT


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one op or of many.

    weight_bytes      of weights, as they are packed; read from memory once in a step, however many rows it has
    kv_bytes          of keys and values read, or by rope_store written; each once in a step
    activation_bytes  read and written; they pass from op to op in caches, so memory's speed does not bound them
    products          multiply-adds of int8
    float_products    multiply-adds of float32: of float weights, and attention's
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    products: int = 0
    float_products: int = 0

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Needs)))


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of one sequence: `rows` tokens from position `start` on, `wanted` of which have their logits asked for."""

    rows: int
    start: int = 0
    wanted: int = 1

    def of(self, value: ops.Value) -> int:
        """Rows that a value has."""
        return self.wanted if value.wanted else self.rows


def needs_of(op: ops.Op, plan: ops.Plan, kv_type: str, step: StepShape) -> Needs:
    """Of one op in one step; the quantizing of a linear op's input is not in it (`quantizing_needs`)."""
    match op:
        case ops.Embed():
            row_bytes = PackedLayout.of(op.table).group_bytes // GROUP_ROWS
            return Needs(step.rows * row_bytes, activation_bytes=_floats(step, op.out))
        case ops.RmsNorm():
            read = step.of(op.out) * op.x.width * _FLOAT
            return Needs(op.weight.size * _FLOAT, activation_bytes=read + _floats(step, op.out))
        case ops.Linear():
            return _linear(op, step)
        case ops.RopeStore():
            entered = step.rows * kv_position_bytes(plan.attention_shape, kv_type)
            return Needs(kv_bytes=entered, activation_bytes=_floats(step, op.q, op.k, op.v, op.out))
        case ops.Attention():
            return _attention(op, plan.attention_shape, kv_type, step)
        case ops.SwiGLU():
            return Needs(activation_bytes=_floats(step, op.gate, op.up, op.out))


def quantizing_needs(op: ops.Linear, step: StepShape) -> Needs:
    """Of making the input of a linear op int8."""
    return Needs(activation_bytes=_floats(step, op.x) + _quantized_bytes(op, step))


def needs_of_step(plan: ops.Plan, kv_type: str, step: StepShape) -> Needs:
    """Of all ops together, activations counted as if each linear op quantized none."""
    return sum((needs_of(op, plan, kv_type, step) for op in plan.ops), Needs())


def kv_position_bytes(shape: ops.AttentionShape, kv_type: str) -> int:
    """Of one position's keys and values in one layer."""
    return shape.kv_heads * HeadLayout.of(kv_type, shape.head_size).n_bytes // BLOCK


def _linear(op: ops.Linear, step: StepShape) -> Needs:
    rows = step.of(op.x)
    weight_bytes = PackedLayout.of(op.weight).n_bytes if rows else 0
    products = rows * op.weight.rows * op.weight.columns
    written = _floats(step, op.out) * (2 if op.adds else 1)
    if op.weight.is_integer:
        return Needs(weight_bytes, 0, _quantized_bytes(op, step) + written, products=products)
    return Needs(weight_bytes, 0, _floats(step, op.x) + written, float_products=products)


def _attention(op: ops.Attention, shape: ops.AttentionShape, kv_type: str, step: StepShape) -> Needs:
    attended = step.rows * step.start + step.rows * (step.rows + 1) // 2  # positions, all rows together
    return Needs(
        kv_bytes=(step.start + step.rows) * kv_position_bytes(shape, kv_type) if step.rows else 0,
        activation_bytes=_floats(step, op.q, op.out),
        float_products=2 * shape.heads * shape.head_size * attended,
    )


def _floats(step: StepShape, *values: ops.Value) -> int:
    return sum(step.of(value) * value.width * _FLOAT for value in values)


def _quantized_bytes(op: ops.Linear, step: StepShape) -> int:
    return step.of(op.x) * op.x.width // 32 * _QUANTIZED_BLOCK
