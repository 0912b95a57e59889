"""Matrix products on the CPU, and the quantization of their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.lowering import FLOAT, REPLICATED_OUTPUT, Buffer, Needs, StepShape, private_inputs
from llmrun.backends.cpu.ops.base import CpuOp
from llmrun.backends.cpu.weights import PackedLayout, panel_bytes, product_kernel
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import linear
from llmrun.formats.layouts.arena import address_of, allocate, round_up
from llmrun.formats.layouts.records import CACHE_LINE
from llmrun.formats.quants.weight_type import BLOCK_COLUMNS, GROUP_ROWS
from llmrun.model.plan.ops.linear import FloatWords, HeadLinear, IntegerWords, Linear, Product, QuantizeWords

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering, OpRecord
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.matrix import Matrix
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.twin import Value


def _linear(work: Lowering, op: Linear) -> None:
    layout = work.packed[op.weight.name].layout
    is_logits = op.out is work.plan.logits
    source = product_input(work, op.x, op.weight)
    out = work.buffer_of(op.out) if op.adds or is_logits else work.place(op.out, private=False)
    assert not (op.adds and (out.private or op.x is op.out)), "threads would read what others write"
    n_groups = -(-op.out.width // GROUP_ROWS)
    words = product_words(work, op.weight, source, out, n_groups, layout.chunk_groups(work.n_threads))
    words = words._replace(adds=int(op.adds), logits=int(is_logits))
    record = _emit(work, op.weight, op.out, source, words)
    record.independent_input = None if op.adds else op.x


def _head_linear(work: Lowering, op: HeadLinear) -> None:
    """Emit a record for each head, with no barrier between them.

    Splitting by head costs little. For 27 layers of 16 heads with a 128 x 512 and a 512 x 128 matrix, the
    products took 2.7 ms (Q8_0, one row, 2 threads). The same number of bytes in two matrices per layer took 2.5 ms.
    """
    layout = work.packed[op.weight.name].layout
    n_groups = layout.n_groups // op.heads
    assert op.weight.rows == op.heads * n_groups * GROUP_ROWS, "a head's outputs must be whole groups"
    assert op.weight.columns % 4 == 0, "a kernel must process columns of one head at a time"
    assert op.x.width == op.heads * op.weight.columns
    out = work.place(op.out, private=False)
    for head in range(op.heads):
        source = product_input(work, op.x, op.weight)
        of_head = Buffer(out.address + FLOAT * GROUP_ROWS * n_groups * head, out.stride, private=False)
        words = product_words(
            work, op.weight, source, of_head, n_groups, layout.chunk_groups(work.n_threads), part=head
        )
        _emit(work, op.weight, op.x, source, words).independent_input = op.x


def _emit(work: Lowering, weight: Matrix, value: Value, source: Buffer, words: IntegerWords | FloatWords) -> OpRecord:
    """Emit a matrix product for the rows of `value`."""
    return work.emit(product_kernel(weight, "linear", "linear"), value, private_inputs(source), words)


def product_input(work: Lowering, x: Value, weight: Matrix) -> Buffer:
    """Return the input rows of a matrix product, quantized if the matrix has integer weights."""
    return quantized(work, x) if weight.is_integer else work.buffers[x]


def product_words(
    work: Lowering,
    weight: Matrix,
    source: Buffer,
    out: Buffer,
    n_groups: int,
    chunk: int,
    part: int = 0,
) -> IntegerWords | FloatWords:
    """Return the kernel arguments for a matrix product that writes to `out`.

    If `weight` contains one matrix of `n_groups` groups per head, `part` is the head's index, which selects the head's
    matrix and its part of the input row.
    """
    packed = work.packed[weight.name]
    layout = packed.layout
    address = packed.address + part * n_groups * layout.group_bytes
    first_column = part * weight.columns
    if not weight.is_integer:
        return FloatWords(
            weights=address,
            groups=n_groups,
            columns=round_up(weight.columns, 4),
            group_bytes=layout.group_bytes,
            x=source.address + FLOAT * first_column,
            x_stride=source.stride,
            out=out.address,
            out_stride=out.stride,
            adds=0,
            chunk=chunk,
            logits=0,
        )
    panels, panels_stride = _panels(work)
    return IntegerWords(
        weights=address,
        groups=n_groups,
        blocks=weight.columns // BLOCK_COLUMNS,
        group_bytes=layout.group_bytes,
        x=source.address + linear.quantized_row_bytes(first_column),
        x_stride=source.stride,
        out=out.address,
        out_stride=out.stride,
        adds=0,
        chunk=chunk,
        logits=0,
        panels=panels,
        panels_stride=panels_stride,
    )


def quantized(work: Lowering, value: Value) -> Buffer:
    """Return the quantized form of a value. The first call for a value emits the record that quantizes it."""
    if value in work.quantized:
        return work.quantized[value]
    x = work.buffers[value]
    stride = round_up(linear.quantized_row_bytes(value.width), CACHE_LINE)  # threads never share a cache line
    made = work.quantized[value] = Buffer(work.take(value, stride), stride, private=True)
    words = QuantizeWords(
        x=x.address, x_stride=x.stride, out=made.address, out_stride=stride, blocks=value.width // BLOCK_COLUMNS
    )
    work.emit(KernelName.of("linear.quantize", "quantize"), value, REPLICATED_OUTPUT | private_inputs(x), words)
    return made


def _panels(work: Lowering) -> tuple[int, int]:
    """Return (address, bytes per thread) of the memory for unpacked weights, which all linear ops share."""
    if "panels" not in work.shared:
        stride = max((panel_bytes(matrix) for matrix in work.plan.matrices if matrix.is_integer), default=0)
        memory = allocate(work.n_threads * stride, "unpacked weights")
        work.keep.append(memory)
        work.shared["panels"] = address_of(memory), stride
    found: tuple[int, int] = work.shared["panels"]
    return found


# --- cost and speed --------------------------------------------------------------------------------------------------


def quantizing_needs(op: Product, step: StepShape) -> Needs:
    """Return the cost of quantizing the input of a matrix product."""
    return Needs(activation_bytes=step.float_bytes(op.x) + quantized_bytes(op.x, step.of(op.x)))


def quantized_bytes(x: Value, rows: int) -> int:
    """Return the size in bytes of `rows` quantized rows of a value."""
    return rows * linear.quantized_row_bytes(x.width)


def _needs(op: Linear | HeadLinear, kv_type: str, step: StepShape) -> Needs:
    rows = step.of(op.x)
    outputs = op.weight.rows if isinstance(op, HeadLinear) else op.out.width
    weight_bytes = PackedLayout.of(op.weight).n_bytes * outputs // op.weight.rows if rows else 0
    products = rows * outputs * op.weight.columns
    written = step.float_bytes(op.out) * (2 if op.changes is not None else 1)
    if op.weight.is_integer:
        return Needs(weight_bytes, 0, quantized_bytes(op.x, rows) + written, products=products)
    return Needs(weight_bytes, 0, step.float_bytes(op.x) + written, float_products=products)


def _seconds(op: Linear | HeadLinear, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    needs = _needs(op, kv_type, step)
    if not needs.weight_bytes:
        return 0.0
    speed = speeds.linear(op.weight.packed)
    reading = needs.weight_bytes / speed.read
    multiplying = (needs.products + needs.float_products) / speed.products(op.weight.columns)
    # The read speed was measured with a single row, so the speed includes the multiply-adds of one row.
    return speed.op + (max(reading, multiplying) if step.of(op.x) > 1 else reading)


OPS: dict[type[Op], CpuOp] = {
    Linear: CpuOp("linear", _linear, _needs, _seconds),
    HeadLinear: CpuOp("head linear", _head_linear, _needs, _seconds),
}
