"""Records of ops with matrices: the embedding, and products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.kernels import plan_ops as ops
from llmrun.kernels import records
from llmrun.kernels.arena import address_of, allocate, round_up
from llmrun.kernels.lowering_base import REPLICATED_OUTPUT, Buffer, QuantizedBuffer, private_inputs
from llmrun.kernels.store import KernelName
from llmrun.kernels.tile_shapes import panel_bytes

if TYPE_CHECKING:
    from llmrun.kernels.lowering_base import Lowering


def embed(work: Lowering, op: ops.Embed) -> None:
    assert op.scale == 1.0
    out = work.place(op.out, private=False)
    table = work.packed[op.table.name]
    layout = table.layout
    words = [table.address, layout.group_bytes, *layout.planes, op.table.columns, out.address, out.stride]
    work.emit(KernelName.of("embed", "embed", weight=op.table.packed), op.out, 0, words)


def linear(work: Lowering, op: ops.Linear) -> None:
    packed = work.packed[op.weight.name]
    layout = packed.layout
    if op.weight.is_integer:
        x = quantized(work, op.x)
        source = x.integers
        head = [packed.address, layout.n_groups, op.weight.columns // 32, layout.group_bytes]
        head += [*layout.planes, source.address, source.stride]
        head += [x.scales, x.offsets, x.sums, x.half_sums, x.scale_stride]
        kernel = KernelName.of("linear_int8", "linear", weight=op.weight.packed)
    else:
        source = work.buffers[op.x]
        head = [packed.address, layout.n_groups, round_up(op.weight.columns, 4), layout.group_bytes]
        head += [source.address, source.stride]
        kernel = KernelName.of("linear_float", "linear", weight=op.weight.kind)
    is_logits = op.out is work.plan.logits
    out = work.buffer_of(op.out) if op.adds or is_logits else work.place(op.out, private=False)
    words = [*head, out.address, out.stride, int(op.adds), layout.chunk_groups, int(is_logits)]
    if op.weight.is_integer:
        words += panels(work)
    record = work.emit(kernel, op.out if is_logits else op.x, private_inputs(source), words)
    record.independent_input = None if op.adds else op.x


def quantized(work: Lowering, value: ops.Value) -> QuantizedBuffer:
    """A value as integers: made once."""
    if value in work.quantized:
        return work.quantized[value]
    x = work.buffers[value]
    n_blocks = value.width // 32
    stride = round_up(value.width, records.CACHE_LINE)
    scale_stride = round_up(4 * n_blocks, records.CACHE_LINE)
    integers = Buffer(work.take(value, stride), stride, private=True)
    scales, offsets, sums = (work.take(value, scale_stride) for _ in range(3))
    half_sums = work.take(value, 2 * scale_stride)
    made = QuantizedBuffer(integers, scales, offsets, sums, half_sums, scale_stride)
    words = [x.address, x.stride, integers.address, stride, scales, offsets, sums, half_sums]
    words += [scale_stride, n_blocks]
    work.emit(KernelName.of("quantize", "quantize"), value, REPLICATED_OUTPUT | private_inputs(x), words)
    work.quantized[value] = made
    return made


def panels(work: Lowering) -> tuple[int, int]:
    """(address, bytes for a thread) of memory to unpack weights in, the same for all linear ops."""
    if "panels" not in work.shared:
        stride = max((panel_bytes(matrix) for matrix in work.plan.matrices if matrix.is_integer), default=0)
        memory = allocate(work.n_threads * stride, "unpacked weights")
        work.keep.append(memory)
        work.shared["panels"] = address_of(memory), stride
    found: tuple[int, int] = work.shared["panels"]
    return found
