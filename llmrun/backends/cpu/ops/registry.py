"""The registry of all ops that the CPU engine supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.ops import (
    activations,
    adapters,
    attention,
    convolution,
    embedding,
    experts,
    linear,
    norms,
    recurrences,
    rope,
    rows,
)

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Needs, StepShape
    from llmrun.backends.cpu.ops.base import CpuOp
    from llmrun.model.plan.ops.base import Op

CPU_OPS: dict[type[Op], CpuOp] = {
    **embedding.OPS,
    **norms.OPS,
    **linear.OPS,
    **adapters.OPS,
    **rows.OPS,
    **rope.OPS,
    **attention.OPS,
    **activations.OPS,
    **convolution.OPS,
    **recurrences.OPS,
    **experts.OPS,
}


def needs_of(op: Op, kv_type: str, step: StepShape) -> Needs:
    """Return the cost of one op in one step, excluding the quantization of its input (`quantizing_needs`)."""
    return CPU_OPS[type(op)].needs(op, kv_type, step)
