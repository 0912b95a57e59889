"""Activation functions on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering import LANES, REPLICATED_OUTPUT, Buffer, float_word, private_inputs
from llmrun.backends.cpu.ops.base import CpuOp, reads_and_writes, takes_as_long_as
from llmrun.base.compiled.kernel import KernelName
from llmrun.model.plan.ops.activations import Activate, Activation, Gated, GatedWords, Xielu, XieluWords

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.twin import Value


def _gated(work: Lowering, op: Gated) -> None:
    emit_gated(work, op.gate, work.buffers[op.up], op.activation, op.out)


def _activate(work: Lowering, op: Activate) -> None:
    """Emit an ungated activation, in the form of a gated activation whose second factor is always 1."""
    # A sigmoid is not zero for the zeros of the padding, so the rows must have no padding.
    assert op.activation is not Activation.SIGMOID or op.out.width % LANES == 0
    emit_gated(work, op.x, work.same_row(np.ones(op.x.width, np.float32)), op.activation, op.out)


def emit_gated(work: Lowering, value: Value, up: Buffer, activation: Activation, result: Value) -> None:
    """Emit result = activation(value) * up."""
    gate, out = work.buffers[value], work.place(result, private=True)
    words = GatedWords(
        gate=gate.address,
        gate_stride=gate.stride,
        up=up.address,
        up_stride=up.stride,
        out=out.address,
        out_stride=out.stride,
        width=result.width,
    )
    kernel = KernelName.of("rows.rowwise", "gated", activation=activation.value)
    work.emit(kernel, result, REPLICATED_OUTPUT | private_inputs(gate, up), words)


def _xielu(work: Lowering, op: Xielu) -> None:
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    words = XieluWords(
        x=x.address,
        x_stride=x.stride,
        out=out.address,
        out_stride=out.stride,
        width=op.out.width,
        positive=float_word(op.curve.positive),
        negative=float_word(op.curve.negative),
        slope=float_word(op.curve.slope),
        least=float_word(op.curve.least),
    )
    work.emit(KernelName.of("rows.rowwise", "xielu"), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


OPS: dict[type[Op], CpuOp] = {
    Gated: CpuOp("gate", _gated, reads_and_writes(lambda op: (op.gate, op.up, op.out)), takes_as_long_as("swiglu")),
    Activate: CpuOp("activation", _activate, reads_and_writes(lambda op: (op.x, op.out)), takes_as_long_as("swiglu")),
    Xielu: CpuOp("activation", _xielu, reads_and_writes(lambda op: (op.x, op.out)), takes_as_long_as("swiglu")),
}
