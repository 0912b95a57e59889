"""The gated short convolution on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.base import LANES, REPLICATED_OUTPUT, private_inputs
from llmrun.backends.cpu.lowering.needs import FLOAT, Needs, StepShape, kv_position_bytes
from llmrun.backends.cpu.ops.base import CpuOp, takes_as_long_as
from llmrun.compiled.store import KernelName
from llmrun.layouts import records
from llmrun.plan.kv_shapes import ConvolutionShape
from llmrun.plan.ops.convolution import ConvolutionWords, Convolve

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.base import Lowering
    from llmrun.plan.ops.base import Op


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
}
