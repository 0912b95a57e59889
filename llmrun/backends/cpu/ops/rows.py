"""CPU ops that add, scale, slice or concatenate rows, and the soft cap on logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from llmrun.backends.cpu.lowering import (
    FLOAT,
    LANES,
    REPLICATED_OUTPUT,
    Buffer,
    Needs,
    StepShape,
    float_word,
    private_inputs,
)
from llmrun.backends.cpu.ops.activations import emit_gated
from llmrun.backends.cpu.ops.base import CpuOp, reads_and_writes, takes_as_long_as
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts.arena import round_up
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.ops.rows import (
    Add,
    AddGated,
    AddWeighted,
    AddWords,
    Bias,
    Clamp,
    ClampWords,
    Concat,
    ConcatWords,
    Multiply,
    Scale,
    Slice,
    SoftCap,
    SoftCapWords,
)

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.twin import Value

_NOTHING = Buffer(0, 0, private=False)


# --- sums ------------------------------------------------------------------------------------------------------------


def _bias(work: Lowering, op: Bias) -> None:
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    _sum(work, op.out, out, x, work.same_row(op.bias), 1.0, _NOTHING)


def _add(work: Lowering, op: Add) -> None:
    out = work.buffers[op.out]
    _sum(work, op.out, out, out, work.buffers[op.y], op.scale, _NOTHING)


def _add_gated(work: Lowering, op: AddGated) -> None:
    out = work.buffers[op.out]
    _sum(work, op.out, out, out, work.buffers[op.y], 1.0, work.buffers[op.gate])


def _add_weighted(work: Lowering, op: AddWeighted) -> None:
    x = work.buffers[op.x]
    out = x if op.changes else work.place(op.out, private=True)
    y, factors = work.buffers[op.y], work.buffers[op.factors]
    _sum(work, op.out, out, x, y, op.offset, factors, gate_at=FLOAT * op.at, is_plain=1)


def _multiply(work: Lowering, op: Multiply) -> None:
    emit_gated(work, op.x, work.same_row(op.weight), Activation.NONE, op.out)


def _scale(work: Lowering, op: Scale) -> None:
    """Emit out = 0 + factor * x, a form that the kernel for sums can compute."""
    x = work.buffers[op.x]
    _sum(work, op.x, x, work.same_row(np.zeros(op.x.width, np.float32)), x, op.factor, _NOTHING)


def _clamp(work: Lowering, op: Clamp) -> None:
    assert op.least <= 0 <= op.most, "the padding of rows must stay zero"
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    words = ClampWords(
        x=x.address,
        x_stride=x.stride,
        out=out.address,
        out_stride=out.stride,
        width=op.out.width,
        least=float_word(op.least),
        most=float_word(op.most),
    )
    work.emit(KernelName.of("rows.rowwise", "clamp"), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


def _sum(
    work: Lowering,
    value: Value,
    out: Buffer,
    x: Buffer,
    y: Buffer,
    factor: float,
    gate: Buffer,
    **of_gate: int,
) -> None:
    """Emit out = x + factor * y. `of_gate` contains the words that describe how the gate changes the factor.

    If the threads share the destination, each row is computed by one thread, and all threads wait at a barrier.
    """
    words = AddWords(
        out=out.address,
        out_stride=out.stride,
        x=x.address,
        x_stride=x.stride,
        y=y.address,
        y_stride=y.stride,
        width=value.width,
        factor=float_word(factor),
        gate=gate.address,
        gate_stride=gate.stride,
        **of_gate,
    )
    flags = (REPLICATED_OUTPUT if out.private else 0) | private_inputs(x, y, gate)
    work.emit(KernelName.of("rows.rowwise", "add"), value, flags, words)


def _bias_needs(op: Bias, kv_type: str, step: StepShape) -> Needs:
    return Needs(op.bias.size * FLOAT, activation_bytes=step.float_bytes(op.x, op.out))


def _multiply_needs(op: Multiply, kv_type: str, step: StepShape) -> Needs:
    return Needs(op.weight.size * FLOAT, activation_bytes=step.float_bytes(op.x, op.out))


# --- parts of rows ---------------------------------------------------------------------------------------------------


class _CopiedPart(Struct, frozen=True):
    """The range of bytes to copy from an input row to each part of an output row."""

    of: Buffer
    first: int
    step: int  # bytes from one part to the next
    size: int


def _slice(work: Lowering, op: Slice) -> None:
    """Emit a copy of the slice, because kernels expect the padding after a row's last feature to be zero."""
    x = work.buffers[op.x]
    part = _CopiedPart(x, FLOAT * op.first, FLOAT * op.x.width // op.groups, FLOAT * op.out.width // op.groups)
    _parts(work, part, _CopiedPart(_NOTHING, 0, 0, 0), op.groups, op.out)


def _concat(work: Lowering, op: Concat) -> None:
    assert op.a.rows is op.b.rows
    of_b = FLOAT * op.b.width // op.groups
    of_a = FLOAT * op.out.width // op.groups - of_b
    is_broadcast = FLOAT * op.a.width == of_a
    a, b = work.buffers[op.a], work.buffers[op.b]
    _parts(work, _CopiedPart(a, 0, 0 if is_broadcast else of_a, of_a), _CopiedPart(b, 0, of_b, of_b), op.groups, op.out)


def _parts(work: Lowering, a: _CopiedPart, b: _CopiedPart, n_parts: int, value: Value) -> None:
    out = work.place(value, private=True)
    words = ConcatWords(
        a=a.of.address + a.first,
        a_stride=a.of.stride,
        a_step=a.step,
        a_bytes=a.size,
        b=b.of.address + b.first,
        b_stride=b.of.stride,
        b_step=b.step,
        b_bytes=b.size,
        out=out.address,
        out_stride=out.stride,
        parts=n_parts,
    )
    work.emit(KernelName.of("rows.rowwise", "concat"), value, REPLICATED_OUTPUT | private_inputs(a.of, b.of), words)


def _soft_cap(work: Lowering, op: SoftCap) -> None:
    assert op.x is work.plan.logits
    words = SoftCapWords(stride=round_up(op.x.width, LANES) * FLOAT, width=op.x.width, cap=float_word(op.cap))
    work.emit(KernelName.of("rows.rowwise", "soft_cap"), op.x, 0, words)


def _soft_cap_seconds(op: SoftCap, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    return speeds.rows("swiglu").shared_seconds(step.of(op.x), op.x.width)


OPS: dict[type[Op], CpuOp] = {
    Bias: CpuOp("bias", _bias, _bias_needs, takes_as_long_as("rmsnorm")),
    Add: CpuOp("add", _add, reads_and_writes(lambda op: (op.y, op.out, op.out)), takes_as_long_as("rmsnorm")),
    AddGated: CpuOp(
        "add",
        _add_gated,
        reads_and_writes(lambda op: (op.y, op.gate, op.out, op.out)),
        takes_as_long_as("rmsnorm"),
    ),
    AddWeighted: CpuOp(
        "add",
        _add_weighted,
        reads_and_writes(lambda op: (op.x, op.y, op.factors, op.out)),
        takes_as_long_as("rmsnorm"),
    ),
    Multiply: CpuOp("multiply", _multiply, _multiply_needs, takes_as_long_as("rmsnorm")),
    Scale: CpuOp("scale", _scale, reads_and_writes(lambda op: (op.x, op.x)), takes_as_long_as("rmsnorm", "x")),
    Clamp: CpuOp("clamp", _clamp, reads_and_writes(lambda op: (op.x, op.out)), takes_as_long_as("rmsnorm")),
    Slice: CpuOp("slice", _slice, reads_and_writes(lambda op: (op.out, op.out)), takes_as_long_as("rmsnorm")),
    Concat: CpuOp("concat", _concat, reads_and_writes(lambda op: (op.a, op.b, op.out)), takes_as_long_as("rmsnorm")),
    SoftCap: CpuOp("soft cap", _soft_cap, reads_and_writes(lambda op: (op.x, op.x)), _soft_cap_seconds),
}
