"""Convolutions over positions on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering import (
    FLOAT,
    LANES,
    REPLICATED_OUTPUT,
    Needs,
    StepShape,
    kv_position_bytes,
    private_inputs,
)
from llmrun.backends.cpu.ops.base import CpuOp, takes_as_long_as
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.model.plan.ops.convolution import (
    CONVOLVED_FEATURES,
    CausalConvolution,
    CausalConvolutionWords,
    ConvolutionWords,
    Convolve,
)
from llmrun.model.plan.shapes import ConvolutionShape, ConvolutionState

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.model.plan.ops.base import Op


def _convolve(work: Lowering, op: Convolve) -> None:
    """Emit a record that stores all rows in the cache, and a record that convolves each row with earlier rows."""
    shape = op.kv.shape
    assert isinstance(shape, ConvolutionShape)
    assert shape.width % LANES == 0
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    cache, block_bytes = work.cache_of(op.kv)
    words = ConvolutionWords(
        x=x.address,
        x_stride=x.stride,
        cache=cache,
        block_bytes=block_bytes,
        tables=work.tables_of(op.kv),
        width=shape.width,
    )
    work.emit(KernelName.of("rows.convolution", "keep"), op.out, records.FLAG_REPLICATED | private_inputs(x), words)
    by_tap = work.kept_vector(np.ascontiguousarray(op.weight.T).reshape(-1))
    words = words._replace(out=out.address, out_stride=out.stride, weight=by_tap, taps=shape.taps)
    work.emit(KernelName.of("rows.convolution", "convolve"), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


def _causal_convolution(work: Lowering, op: CausalConvolution) -> None:
    """Emit a record in which the threads divide the features, because each feature has its own state."""
    shape = op.state.shape
    assert isinstance(shape, ConvolutionState)
    assert all(out.width % LANES == 0 for out in op.outs)
    x, outs = work.buffers[op.x], [work.place(out, private=False) for out in op.outs]
    ends = np.cumsum([FLOAT * out.width for out in op.outs]).tolist()
    # With fewer than three outputs, the missing outputs begin after the last feature, so they receive no features.
    firsts, targets = [*ends[:-1], *[ends[-1]] * 2], [*outs, outs[-1], outs[-1]]
    if "convolution" not in work.shared:
        work.shared["convolution"] = allocate(FLOAT * CONVOLVED_FEATURES * work.n_threads, "convolution scratch")
        work.keep.append(work.shared["convolution"])
    bias = np.zeros(shape.width, np.float32) if op.bias is None else op.bias
    state, state_bytes = work.state_of(op.state)
    words = CausalConvolutionWords(
        x=x.address,
        x_stride=x.stride,
        width=shape.width,
        weight=work.kept_vector(np.ascontiguousarray(op.weight.T).reshape(-1)),
        bias=work.kept_vector(bias),
        taps=shape.taps,
        state=state,
        state_bytes=state_bytes,
        ring_rows=shape.ring_rows,
        out=targets[0].address,
        out_stride=targets[0].stride,
        second=firsts[0],
        second_out=targets[1].address,
        second_stride=targets[1].stride,
        third=firsts[1],
        third_out=targets[2].address,
        third_stride=targets[2].stride,
        scratch=address_of(work.shared["convolution"]),
    )
    work.emit(KernelName.of("recurrent.convolution", "causal_convolution"), op.outs[0], private_inputs(x), words)


def _causal_needs(op: CausalConvolution, kv_type: str, step: StepShape) -> Needs:
    shape = op.state.shape
    earlier, stored = min(step.start, op.weight.shape[1] - 1), min(step.rows, op.weight.shape[1] - 1)
    return Needs(
        op.weight.size * FLOAT,
        kv_bytes=(earlier + stored) * shape.row_bytes if step.rows else 0,
        activation_bytes=step.float_bytes(op.x, *op.outs),
        float_products=step.rows * op.weight.size,
    )


def _needs(op: Convolve, kv_type: str, step: StepShape) -> Needs:
    position = kv_position_bytes(op.kv.shape, kv_type)
    earlier = min(step.start, op.kv.shape.window - 1)
    return Needs(
        op.weight.size * FLOAT,
        kv_bytes=(2 * step.rows + earlier) * position,
        activation_bytes=step.float_bytes(op.x, op.out),
        float_products=step.rows * op.weight.size,
    )


OPS: dict[type[Op], CpuOp] = {
    Convolve: CpuOp("convolution", _convolve, _needs, takes_as_long_as("rmsnorm")),
    CausalConvolution: CpuOp("convolution", _causal_convolution, _causal_needs, takes_as_long_as("swiglu", "x")),
}
