"""Normalization of rows on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering import FLOAT, LANES, REPLICATED_OUTPUT, Needs, StepShape, float_word, private_inputs
from llmrun.backends.cpu.ops.base import CpuOp, reads_and_writes, takes_as_long_as
from llmrun.base.compiled.kernel import KernelName
from llmrun.model.plan.ops.norms import (
    CutOff,
    CutOffWords,
    HeadNorm,
    LayerNorm,
    MatchLength,
    MatchLengthWords,
    NormWords,
    RmsNorm,
)
from llmrun.model.plan.twin import Rows

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.model.plan.ops.base import Op

    _Norm = RmsNorm | HeadNorm | LayerNorm


def _rmsnorm(work: Lowering, op: RmsNorm) -> None:
    _norm(work, "rmsnorm", op, op.x.width, heads=1)


def _headnorm(work: Lowering, op: HeadNorm) -> None:
    head_size = op.weight.shape[-1]
    assert head_size % LANES == 0
    weight_step = FLOAT * head_size if op.weight.ndim > 1 else 0
    _norm(work, "rmsnorm", op, head_size, heads=op.x.width // head_size, weight_step=weight_step)


def _layernorm(work: Lowering, op: LayerNorm) -> None:
    bias = np.zeros_like(op.weight) if op.bias is None else op.bias
    _norm(work, "layernorm", op, op.x.width, bias=work.kept_vector(bias))


def _norm(
    work: Lowering, name: str, op: _Norm, width: int, heads: int = 0, weight_step: int = 0, bias: int = 0
) -> None:
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    words = NormWords(
        x=x.address,
        x_stride=x.stride,
        out=out.address,
        out_stride=out.stride,
        weight=work.kept_vector(op.weight.reshape(-1)),
        width=width,
        epsilon=float_word(op.epsilon),
        gathers=int(op.out.rows is Rows.WANTED and op.x.rows is not Rows.WANTED),
        heads=heads,
        weight_step=weight_step,
        bias=bias,
    )
    work.emit(KernelName.of("rows.norms", name), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


def _match_length(work: Lowering, op: MatchLength) -> None:
    x, like, out = work.buffers[op.x], work.buffers[op.like], work.place(op.out, private=True)
    words = MatchLengthWords(
        x=x.address,
        x_stride=x.stride,
        like=like.address,
        like_stride=like.stride,
        out=out.address,
        out_stride=out.stride,
        width=op.out.width,
    )
    work.emit(KernelName.of("rows.lengths", "match_length"), op.out, REPLICATED_OUTPUT | private_inputs(x, like), words)


def _cut_off(work: Lowering, op: CutOff) -> None:
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    words = CutOffWords(
        x=x.address,
        x_stride=x.stride,
        out=out.address,
        out_stride=out.stride,
        width=op.out.width,
        deviations=float_word(op.deviations),
    )
    work.emit(KernelName.of("rows.lengths", "cut_off"), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


def _needs(op: _Norm, kv_type: str, step: StepShape) -> Needs:
    read = step.of(op.out) * op.x.width * FLOAT
    weights = op.weight.size + (op.bias.size if isinstance(op, LayerNorm) and op.bias is not None else 0)
    return Needs(weights * FLOAT, activation_bytes=read + step.float_bytes(op.out))


OPS: dict[type[Op], CpuOp] = {
    RmsNorm: CpuOp("rmsnorm", _rmsnorm, _needs, takes_as_long_as("rmsnorm")),
    LayerNorm: CpuOp("layernorm", _layernorm, _needs, takes_as_long_as("rmsnorm")),
    HeadNorm: CpuOp("head norm", _headnorm, _needs, takes_as_long_as("rmsnorm")),
    MatchLength: CpuOp(
        "match length",
        _match_length,
        reads_and_writes(lambda op: (op.x, op.like, op.out)),
        takes_as_long_as("rmsnorm"),
    ),
    CutOff: CpuOp("cutoff", _cut_off, reads_and_writes(lambda op: (op.x, op.out)), takes_as_long_as("rmsnorm")),
}
