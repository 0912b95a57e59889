"""CPU ops that process the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.lowering.base import LANES, float_word
from llmrun.backends.cpu.lowering.needs import FLOAT
from llmrun.backends.cpu.ops.base import CpuOp, reads_and_writes
from llmrun.base.compiled.store import KernelName
from llmrun.formats.layouts.arena import round_up
from llmrun.model.plan.ops.logits import SoftCap, SoftCapWords

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.base import Lowering
    from llmrun.backends.cpu.lowering.needs import StepShape
    from llmrun.backends.cpu.speeds.figures import SpeedTable
    from llmrun.model.plan.ops.base import Op


def _soft_cap(work: Lowering, op: SoftCap) -> None:
    assert op.x is work.plan.logits
    words = SoftCapWords(stride=round_up(op.x.width, LANES) * FLOAT, width=op.x.width, cap=float_word(op.cap))
    work.emit(KernelName.of("rows.rowwise", "soft_cap"), op.x, 0, words)


def _seconds(op: SoftCap, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    return speeds.rows("swiglu").shared_seconds(step.of(op.x), op.x.width)


OPS: dict[type[Op], CpuOp] = {
    SoftCap: CpuOp("soft cap", _soft_cap, reads_and_writes(lambda op: (op.x, op.x)), _seconds),
}
