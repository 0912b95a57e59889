"""Activation functions on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.base import LANES, REPLICATED_OUTPUT, Buffer, private_inputs
from llmrun.backends.cpu.ops.base import CpuOp, reads_and_writes, takes_as_long_as
from llmrun.compiled.store import KernelName
from llmrun.plan.ops.activations import Activate, Activation, Gated, GatedWords

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.base import Lowering
    from llmrun.plan.ops.base import Op
    from llmrun.plan.values import Value


def _gated(work: Lowering, op: Gated) -> None:
    _activate_times(work, op, op.gate, work.buffers[op.up])


def _activate(work: Lowering, op: Activate) -> None:
    """Emit an ungated activation, in the form of a gated activation whose second factor is always 1."""
    _activate_times(work, op, op.x, work.same_row(np.ones(op.x.width, np.float32)))


def _activate_times(work: Lowering, op: Gated | Activate, value: Value, up: Buffer) -> None:
    # The sigmoid of the padding would not be zero, unless it is multiplied by zero.
    assert isinstance(op, Gated) or op.activation is not Activation.SIGMOID or op.out.width % LANES == 0
    gate, out = work.buffers[value], work.place(op.out, private=True)
    words = GatedWords(
        gate=gate.address,
        gate_stride=gate.stride,
        up=up.address,
        up_stride=up.stride,
        out=out.address,
        out_stride=out.stride,
        width=op.out.width,
    )
    kernel = KernelName.of("rows.rowwise", "gated", activation=op.activation.value)
    work.emit(kernel, op.out, REPLICATED_OUTPUT | private_inputs(gate, up), words)


OPS: dict[type[Op], CpuOp] = {
    Gated: CpuOp("gate", _gated, reads_and_writes(lambda op: (op.gate, op.up, op.out)), takes_as_long_as("swiglu")),
    Activate: CpuOp("activation", _activate, reads_and_writes(lambda op: (op.x, op.out)), takes_as_long_as("swiglu")),
}
