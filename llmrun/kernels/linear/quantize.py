"""Quantizes activations to int8 in blocks of 32, and computes the sums that the dot products use (int8.py).

Quantizing is cheap, so in a step of one row every thread quantizes the whole row (records.py).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.linear import BLOCK_BYTES, INTEGERS, SCALE
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row
from llmrun.kernels.compiler import kernel
from llmrun.model.plan.ops.linear import QuantizeWords

_QUANTIZE = records.offsets(QuantizeWords)
# The number of blocks quantized together. Reducing their maxima and sums together uses only a quarter of the shuffles
# that reducing them separately would.
# In a prefill of 256 tokens with a 1.24B model, quantization took 15 and 13 ms in two runs, compared with 20 and 21 ms
# when blocks were quantized one at a time. The rest of the time is spent reading from the outer caches.
_TOGETHER = 16


def _quantize_blocks(count: int) -> Any:
    @intrinsic
    def quantize_blocks(typingctx: Any, x: Any, y: Any) -> Any:
        """Quantize `count` (1 or 16) blocks of 32 floats at x to the blocks at y."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, y = args
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
                at = index // 2 * BLOCK_BYTES + INTEGERS + 16 * (index % 2)
                integers = builder.trunc(rounded[-1], ir.VectorType(simd.I8, 16))
                simd.emit_store(builder, simd.emit_offset(builder, y, at), integers, 16)
            low_sum, high_sum = (_emit_fold_each(builder, rounded[first::2], _emit_added) for first in (0, 1))
            total = builder.add(low_sum, high_sum)
            eight, zero = simd.constant(simd.I32X16, -8), simd.constant(simd.I32X16, 0)
            product = builder.fmul(scale, builder.sitofp(total, simd.F32X16))
            offset, product = builder.mul(total, eight), builder.bitcast(product, simd.I32X16)
            low = builder.sub(zero, low_sum)
            four = [builder.bitcast(scale, simd.I32X16), offset, product, low]
            for index, words in enumerate(_emit_transposed(builder, four)[:count]):
                simd.emit_store(builder, simd.emit_offset(builder, y, index * BLOCK_BYTES + SCALE), words, 16)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

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


def _emit_transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Transpose four <16 x i32> into sixteen <4 x i32>: vector i contains lane i of each input.

    Each shuffle stays within 128-bit lanes, so on x86 it is a single instruction.
    """
    # Interleave the elements 0 and 1, or 2 and 3, of each 128-bit lane.
    low = [16 * (i % 2) + 4 * (i // 4) + i % 4 // 2 for i in range(16)]
    high = [lane + 2 for lane in low]
    # Join the low, or the high, 64 bits of each 128-bit lane.
    firsts = [4 * (i // 4) + 16 * (i % 4 // 2) + i % 2 for i in range(16)]
    seconds = [lane + 2 for lane in firsts]

    def shuffled(pair: list[Any], order: list[int]) -> Any:
        return builder.shuffle_vector(*pair, ir.Constant(simd.I32X16, order))

    quarters = []
    for pairs in (low, high):
        two = [shuffled(vectors[:2], pairs), shuffled(vectors[2:], pairs)]
        quarters += [shuffled(two, firsts), shuffled(two, seconds)]
    return [simd.emit_part(builder, quarters[lane % 4], lane // 4, 4) for lane in range(16)]


_quantize_together, _quantize_one = _quantize_blocks(_TOGETHER), _quantize_blocks(1)


@kernel
def quantize(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Quantize rows to int8 in blocks of 32, each with its scale and sums (layouts/linear.py)."""
    rows = n_rows(op, step)
    x_stride = load_i64(op + _QUANTIZE.x_stride)
    y_stride = load_i64(op + _QUANTIZE.out_stride)
    n_blocks = load_i64(op + _QUANTIZE.blocks)
    x0 = load_i64(op + _QUANTIZE.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
    y0 = load_i64(op + _QUANTIZE.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
    row = first_item(op, step, thread, n_threads, rows)
    while row < rows:
        x, y = x0 + row * x_stride, y0 + row * y_stride
        block = 0
        while block + _TOGETHER <= n_blocks:
            _quantize_together(x + 128 * block, y + BLOCK_BYTES * block)
            block += _TOGETHER
        while block < n_blocks:
            _quantize_one(x + 128 * block, y + BLOCK_BYTES * block)
            block += 1
        row = next_item(op, step, row, n_threads, rows)
