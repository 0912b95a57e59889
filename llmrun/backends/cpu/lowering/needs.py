"""What each op of a plan has to read and to multiply: the work that a profile or a roofline holds its time against."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmrun.backends.cpu.weights.packed import PackedLayout
from llmrun.layouts.kv_blocks import BLOCK
from llmrun.layouts.packed_types import GROUP_ROWS
from llmrun.plan import ops
from llmrun.plan.kv_shapes import AttentionShape, KVShape
from llmrun.plan.plan import Plan

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
        return self.wanted if value.rows is ops.Rows.WANTED else self.rows * value.copies


def needs_of(op: ops.Op, kv_type: str, step: StepShape) -> Needs:
    """Of one op in one step; the quantizing of a linear op's input is not in it (`quantizing_needs`)."""
    match op:
        case ops.Embed():
            row_bytes = PackedLayout.of(op.table).group_bytes // GROUP_ROWS
            return Needs(step.rows * row_bytes, activation_bytes=_floats(step, op.out))
        case ops.RmsNorm() | ops.LayerNorm() | ops.HeadNorm():
            read = step.of(op.out) * op.x.width * _FLOAT
            weights = op.weight.size + (op.bias.size if isinstance(op, ops.LayerNorm) and op.bias is not None else 0)
            return Needs(weights * _FLOAT, activation_bytes=read + _floats(step, op.out))
        case ops.Bias():
            return Needs(op.bias.size * _FLOAT, activation_bytes=_floats(step, op.x, op.out))
        case ops.Add():
            return Needs(activation_bytes=_floats(step, op.y, op.out, op.out))
        case ops.AddGated():
            return Needs(activation_bytes=_floats(step, op.y, op.gate, op.out, op.out))
        case ops.Activate():
            return Needs(activation_bytes=_floats(step, op.x, op.out))
        case ops.SoftCap() | ops.Scale():
            return Needs(activation_bytes=_floats(step, op.x, op.x))
        case ops.Columns():
            return Needs(activation_bytes=_floats(step, op.out, op.out))
        case ops.Join():
            return Needs(activation_bytes=_floats(step, op.a, op.b, op.out))
        case ops.Linear() | ops.HeadLinear():
            return _linear(op, step)
        case ops.Rotate():
            return Needs(activation_bytes=_floats(step, op.q, op.out))
        case ops.Convolve():
            return _convolution(op, kv_type, step)
        case ops.Route():
            return Needs(activation_bytes=_floats(step, op.logits))
        case ops.ExpertLinear():
            return _expert_linear(op, step)
        case ops.ExpertBias():
            return Needs(step.of(op.x) * op.x.width * _FLOAT, activation_bytes=_floats(step, op.x, op.out))
        case ops.Combine():
            return Needs(activation_bytes=_floats(step, op.y, *(op.out,) * (1 + op.adds)))
        case ops.RopeStore():
            entered = step.rows * kv_position_bytes(op.place.shape, kv_type)
            return Needs(kv_bytes=entered, activation_bytes=_floats(step, op.q, op.k, op.v, op.out))
        case ops.Attention():
            return _attention(op, kv_type, step)
        case ops.Gated():
            return Needs(activation_bytes=_floats(step, op.gate, op.up, op.out))


def quantizing_needs(op: ops.Product, step: StepShape) -> Needs:
    """Of making the input of a product int8."""
    return Needs(activation_bytes=_floats(step, op.x) + _quantized_bytes(op, step))


def needs_of_step(plan: Plan, kv_type: str, step: StepShape) -> Needs:
    """Of all ops together, activations counted as if each linear op quantized none."""
    return sum((needs_of(op, kv_type, step) for op in plan.ops), Needs())


def kv_position_bytes(shape: KVShape, kv_type: str) -> int:
    """Of what one layer keeps of a position."""
    return shape.block_bytes(kv_type) // BLOCK


def _linear(op: ops.Linear | ops.HeadLinear, step: StepShape) -> Needs:
    rows = step.of(op.x)
    weight_bytes = PackedLayout.of(op.weight).n_bytes if rows else 0
    products = rows * op.weight.rows * op.weight.columns
    written = _floats(step, op.out) * (2 if isinstance(op, ops.Linear) and op.adds else 1)
    if op.weight.is_integer:
        return Needs(weight_bytes, 0, _quantized_bytes(op, step) + written, products=products)
    return Needs(weight_bytes, 0, _floats(step, op.x) + written, float_products=products)


def _expert_linear(op: ops.ExpertLinear, step: StepShape) -> Needs:
    """Of experts as many as are expected to be chosen by one row or more, if all are as likely."""
    rows, routing = step.of(op.out), op.routing
    missed: float = (1 - routing.used / routing.experts) ** step.rows
    weight_bytes = round(PackedLayout.of(op.weight).n_bytes * (1 - missed))
    products = rows * op.out.width * op.weight.columns
    written = _floats(step, op.out)
    if op.weight.is_integer:
        read = rows * op.x.width // 32 * _QUANTIZED_BLOCK
        return Needs(weight_bytes, 0, read + written, products=products)
    return Needs(weight_bytes, 0, rows * op.x.width * _FLOAT + written, float_products=products)


def _convolution(op: ops.Convolve, kv_type: str, step: StepShape) -> Needs:
    position = kv_position_bytes(op.place.shape, kv_type)
    earlier = min(step.start, op.place.shape.window - 1)
    return Needs(
        op.weight.size * _FLOAT,
        kv_bytes=(2 * step.rows + earlier) * position,
        activation_bytes=_floats(step, op.x, op.out),
        float_products=step.rows * op.weight.size,
    )


def _attention(op: ops.Attention, kv_type: str, step: StepShape) -> Needs:
    shape = op.place.shape
    assert isinstance(shape, AttentionShape)
    lengths = range(step.start + 1, step.start + step.rows + 1)
    attended = sum(min(length, shape.window) for length in lengths) if shape.window else sum(lengths)
    kept = step.start + step.rows
    return Needs(
        kv_bytes=min(kept, shape.window + step.rows - 1 if shape.window else kept) * kv_position_bytes(shape, kv_type)
        if step.rows
        else 0,
        activation_bytes=_floats(step, op.q, op.out),
        float_products=shape.heads * (shape.head_size + shape.value_size) * attended,
    )


def _floats(step: StepShape, *values: ops.Value) -> int:
    return sum(step.of(value) * value.width * _FLOAT for value in values)


def _quantized_bytes(op: ops.Product, step: StepShape) -> int:
    return step.of(op.x) * op.x.width // 32 * _QUANTIZED_BLOCK
