"""Records of ops with matrices: the embedding, and products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.lowering.base import (
    FLOAT,
    REPLICATED_OUTPUT,
    Buffer,
    QuantizedBuffer,
    float_word,
    private_inputs,
)
from llmrun.backends.cpu.weights.packed import panel_bytes
from llmrun.compiled.store import KernelName
from llmrun.layouts import records
from llmrun.layouts.arena import address_of, allocate, round_up
from llmrun.layouts.packed_types import BLOCK_COLUMNS, GROUP_ROWS
from llmrun.plan import ops

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.base import Lowering, Record
    from llmrun.plan.matrix import Matrix


def embed(work: Lowering, op: ops.Embed) -> None:
    private = work.is_private_sum(op.out)
    out = work.place(op.out, private=private)
    table = work.packed[op.table.name]
    layout = table.layout
    words = [table.address, layout.group_bytes, *layout.planes, op.table.columns, out.address, out.stride]
    kernel = KernelName.of("linear.embed", "embed", weight=op.table.packed)
    work.emit(kernel, op.out, REPLICATED_OUTPUT if private else 0, [*words, float_word(op.scale)])


def linear(work: Lowering, op: ops.Linear) -> None:
    layout = work.packed[op.weight.name].layout
    is_logits = op.out is work.plan.logits
    words, flags = source_words(work, op.x, op.weight, layout.n_groups)
    out = work.buffer_of(op.out) if op.adds or is_logits else work.place(op.out, private=False)
    assert not (op.adds and out.private)
    words += [out.address, out.stride, int(op.adds), layout.chunk_groups, int(is_logits)]
    record = _emit_product(work, op.weight, op.out if is_logits else op.x, flags, words)
    record.independent_input = None if op.adds else op.x


def head_linear(work: Lowering, op: ops.HeadLinear) -> None:
    """A record for each head, with no barrier between them: 16 heads of 128 x 512 and back, 27 layers, Q8_0, one row
    on 2 threads took 2.7 ms where as many bytes in two matrices a layer took 2.5."""
    layout = work.packed[op.weight.name].layout
    n_groups = layout.n_groups // op.heads
    assert op.weight.rows == op.heads * n_groups * GROUP_ROWS, "a head's outputs are whole groups"
    assert op.weight.columns % 4 == 0, "what a kernel takes at once are columns of one head"
    assert op.x.width == op.heads * op.weight.columns
    out = work.place(op.out, private=False)
    for head in range(op.heads):
        words, flags = source_words(work, op.x, op.weight, n_groups, head)
        words += [out.address + FLOAT * GROUP_ROWS * n_groups * head, out.stride, 0, layout.chunk_groups, 0]
        _emit_product(work, op.weight, op.x, flags, words).independent_input = op.x


def _emit_product(work: Lowering, weight: Matrix, value: ops.Value, flags: int, words: list[int]) -> Record:
    """With the value's rows."""
    if weight.is_integer:
        kernel = KernelName.of("linear.int8", "linear", weight=weight.packed)
        return work.emit(kernel, value, flags, [*words, *panels(work)])
    return work.emit(KernelName.of("linear.floats", "linear", weight=weight.kind), value, flags, words)


def source_words(work: Lowering, x: ops.Value, weight: Matrix, n_groups: int, part: int = 0) -> tuple[list[int], int]:
    """(words, flags): of weights, and of the rows they are multiplied by, made integers where they are. `part`: of a
    matrix of several of `n_groups` groups each, which belong to as many parts of a row."""
    packed = work.packed[weight.name]
    layout = packed.layout
    first_column = part * weight.columns
    words = [packed.address + part * n_groups * layout.group_bytes, n_groups]
    if not weight.is_integer:
        floats = work.buffers[x]
        words += [round_up(weight.columns, 4), layout.group_bytes]
        return [*words, floats.address + FLOAT * first_column, floats.stride], private_inputs(floats)
    made, block = quantized(work, x), first_column // BLOCK_COLUMNS
    words += [weight.columns // BLOCK_COLUMNS, layout.group_bytes, *layout.planes]
    words += [made.integers.address + first_column, made.integers.stride]
    words += [address + 4 * block for address in (made.scales, made.offsets, made.sums)]
    return [*words, made.half_sums + 8 * block, made.scale_stride], private_inputs(made.integers)


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
    work.emit(KernelName.of("linear.quantize", "quantize"), value, REPLICATED_OUTPUT | private_inputs(x), words)
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
