"""Quantizes activations to int8 in blocks of 32, and computes the sums that the dot products use (int8.py).

Quantizing is cheap, so in a step of one row every thread quantizes the whole row (records.py).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row
from llmrun.kernels.compiler import kernel
from llmrun.layouts import records
from llmrun.plan.ops.linear import QuantizeWords

_QUANTIZE = records.offsets(QuantizeWords)
# The number of blocks quantized together. Reducing their maxima and sums together uses only a quarter of the shuffles
# that reducing them separately would.
# In a prefill of 256 tokens with a 1.24B model, quantization took 15 and 13 ms in two runs, compared with 20 and 21 ms
# when blocks were quantized one at a time. The rest of the time is spent reading from the outer caches.
_TOGETHER = 16


def _quantize_blocks(count: int) -> Any:
    @intrinsic
    def quantize_blocks(typingctx: Any, x: Any, y: Any, scales: Any, offsets: Any, sums: Any, half_sums: Any) -> Any:
        """Quantize `count` (1 or 16) blocks of 32 floats at x, and write the results to the other addresses."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, y, scales, offsets, sums, half_sums = args
            halves = [
                simd.emit_load(builder, simd.emit_offset(builder, x, 64 * index), simd.F32X16, 4)
                for index in range(2 * count)
            ]
            sizes = [simd.emit_absolute(builder, half) for half in halves]
            pairs = zip(sizes[::2], sizes[1::2], strict=True)
            largest = _emit_fold_each(builder, [simd.emit_larger(builder, *pair) for pair in pairs], simd.emit_larger)
            scale, inverse = _emit_scales(builder, largest)
            rounded = []
            for index, half in enumerate(halves):
                factor = _emit_lane(builder, inverse, index // 2)
                rounded.append(simd.emit_rounded(builder, builder.fmul(half, factor)))
                to = simd.emit_offset(builder, y, 16 * index)
                simd.emit_store(builder, to, builder.trunc(rounded[-1], ir.VectorType(simd.I8, 16)))
            low_sum, high_sum = (_emit_fold_each(builder, rounded[first::2], _emit_added) for first in (0, 1))
            total = builder.add(low_sum, high_sum)
            eight, zero = simd.constant(simd.I32X16, -8), simd.constant(simd.I32X16, 0)
            product = builder.fmul(scale, builder.sitofp(total, simd.F32X16))
            for address, value in ((scales, scale), (offsets, builder.mul(total, eight)), (sums, product)):
                _emit_store_first(builder, address, value, count)
            both = _emit_interleaved(builder, builder.sub(zero, low_sum), builder.sub(zero, high_sum))
            _emit_store_first(builder, half_sums, both, 2 * count)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return quantize_blocks


def _emit_added(builder: Any, a: Any, b: Any) -> Any:
    return builder.add(a, b)


def _emit_fold_each(builder: Any, vectors: list[Any], combine: Any) -> Any:
    """Reduce each vector to one value, and return the value of vector i in lane i.

    If there is only one vector, every lane contains its value.
    """
    if len(vectors) == 1:
        return simd.emit_splat(builder, simd.emit_fold(builder, vectors[0], lambda a, b: combine(builder, a, b)))
    # Each round combines neighboring lanes, so the results of two vectors fit in one vector.
    even, odd = (ir.Constant(simd.I32X16, list(range(first, 32, 2))) for first in (0, 1))
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            combine(builder, builder.shuffle_vector(*pair, even), builder.shuffle_vector(*pair, odd)) for pair in pairs
        ]
    return vectors[0]


def _emit_scales(builder: Any, largest: Any) -> tuple[Any, Any]:
    """Emit (scale, inverse of the scale) for each block.

    If the largest magnitude is below 1e-36, both are 0, because the inverse could overflow. Such a block is practically
    zero.
    """
    most, zero = simd.constant(simd.F32X16, 127.0), simd.constant(simd.F32X16, 0.0)
    alive = builder.fcmp_ordered(">", largest, simd.constant(simd.F32X16, 1e-36))
    scale = builder.select(alive, builder.fdiv(largest, most), zero)
    return scale, builder.select(alive, builder.fdiv(most, largest), zero)


def _emit_lane(builder: Any, vector: Any, lane: int) -> Any:
    """Broadcast one lane to all lanes."""
    return builder.shuffle_vector(vector, vector, ir.Constant(simd.I32X16, [lane] * 16))


def _emit_interleaved(builder: Any, a: Any, b: Any) -> Any:
    """Interleave two vectors into 32 lanes: a0 b0 a1 b1 ..."""
    order = [lane // 2 + 16 * (lane % 2) for lane in range(32)]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(simd.I32, 32), order))


def _emit_store_first(builder: Any, address: Any, vector: Any, count: int) -> None:
    lanes = ir.Constant(ir.VectorType(simd.I32, count), list(range(count)))
    simd.emit_store(builder, address, builder.shuffle_vector(vector, vector, lanes), 4)


_quantize_together, _quantize_one = _quantize_blocks(_TOGETHER), _quantize_blocks(1)


@kernel
def quantize(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Quantize rows to int8 in blocks of 32.

    For each block, also store values that the dot products use: the scale, -8 x the sum, scale x the sum, and the
    negated sum of each half.
    """
    rows = n_rows(op, step)
    x_stride = load_i64(op + _QUANTIZE.x_stride)
    y_stride = load_i64(op + _QUANTIZE.integers_stride)
    scale_stride = load_i64(op + _QUANTIZE.scale_stride)
    n_blocks = load_i64(op + _QUANTIZE.blocks)
    x0 = load_i64(op + _QUANTIZE.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
    first = private_row(op, step, thread, PRIVATE_OUTPUT)
    row = first_item(op, step)
    while row < rows:
        x = x0 + row * x_stride
        y = load_i64(op + _QUANTIZE.integers) + (first + row) * y_stride
        at = (first + row) * scale_stride
        scales, offsets = load_i64(op + _QUANTIZE.scales) + at, load_i64(op + _QUANTIZE.offsets) + at
        sums, half_sums = load_i64(op + _QUANTIZE.sums) + at, load_i64(op + _QUANTIZE.half_sums) + 2 * at
        block = 0
        while block + _TOGETHER <= n_blocks:
            to = 4 * block
            _quantize_together(
                x + 128 * block, y + 32 * block, scales + to, offsets + to, sums + to, half_sums + 2 * to
            )
            block += _TOGETHER
        while block < n_blocks:
            to = 4 * block
            _quantize_one(x + 128 * block, y + 32 * block, scales + to, offsets + to, sums + to, half_sums + 2 * to)
            block += 1
        row = next_item(op, step, row)
