"""Records of ops on whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.kernels import plan_ops as ops
from llmrun.kernels.lowering_base import REPLICATED_OUTPUT, float_word
from llmrun.kernels.store import KernelName

if TYPE_CHECKING:
    from llmrun.kernels.lowering_base import Lowering


def rmsnorm(work: Lowering, op: ops.RmsNorm) -> None:
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    gathers = op.out.rows is ops.Rows.WANTED and op.x.rows is not ops.Rows.WANTED
    words = [x.address, x.stride, out.address, out.stride, work.kept_vector(op.weight), op.x.width]
    words += [float_word(op.epsilon), int(gathers)]
    work.emit(KernelName.of("rowwise", "rmsnorm"), op.out, REPLICATED_OUTPUT, words)


def gated(work: Lowering, op: ops.Gated) -> None:
    assert op.activation is ops.Activation.SILU
    gate, up, out = work.buffers[op.gate], work.buffers[op.up], work.place(op.out, private=True)
    words = [gate.address, gate.stride, up.address, up.stride, out.address, out.stride, op.out.width]
    work.emit(KernelName.of("rowwise", "swiglu"), op.out, REPLICATED_OUTPUT, words)
