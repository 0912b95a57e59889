"""All kinds of ops that the CPU engine runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.lowering.needs import Needs
from llmrun.backends.cpu.ops import (
    activations,
    attention,
    convolution,
    embedding,
    experts,
    linear,
    logits,
    norms,
    rope,
    rows,
)

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.needs import StepShape
    from llmrun.backends.cpu.ops.base import CpuOp
    from llmrun.plan.ops.base import Op
    from llmrun.plan.plan import Plan

CPU_OPS: dict[type[Op], CpuOp] = {
    **embedding.OPS,
    **norms.OPS,
    **linear.OPS,
    **rows.OPS,
    **rope.OPS,
    **attention.OPS,
    **activations.OPS,
    **convolution.OPS,
    **experts.OPS,
    **logits.OPS,
}


def needs_of(op: Op, kv_type: str, step: StepShape) -> Needs:
    """Return the needs of one op in one step, without quantizing its input (`quantizing_needs`)."""
    return CPU_OPS[type(op)].needs(op, kv_type, step)


def needs_of_step(plan: Plan, kv_type: str, step: StepShape) -> Needs:
    """Return the sum of the needs of all ops, without quantizing the inputs of products."""
    return sum((needs_of(op, kv_type, step) for op in plan.ops), Needs())
