"""Rotary positions, the paged KV cache, and attention over it.

The cache of a layer is an array of blocks of 32 positions; block b of KV head h holds keys float16[head size, 32] and
then values float16[32, head size], so that both products below run along vectors of positions or of features. A row's
block table says which block holds its positions 32i to 32i + 31.

Attention reads a row's blocks in order of position and keeps a running maximum, sum and weighted value (the online
softmax of Milakov and Gimelshein, arXiv:1805.02867). The order depends on the row's position alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba import types
from numba.extending import intrinsic

from llmrun.kernels import records, simd
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.memory import load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    claim,
    first_item,
    n_rows,
    next_item,
    private_row,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS
BLOCK = 32  # positions in a block of the KV cache

# --- rope and store ------------------------------------------------------------------------------------------------

A_Q, A_Q_STRIDE, A_K, A_K_STRIDE, A_V, A_V_STRIDE, A_ROTATED, A_ROTATED_STRIDE = (ARG + 8 * i for i in range(8))
A_CACHE, A_BLOCK_BYTES, A_Q_HEADS, A_KV_HEADS, A_PAIRS = (ARG + 8 * i for i in range(8, 13))


def _store_half(level: str) -> Any:
    @intrinsic
    def store_half(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if level == "portable":
                halves = simd.emit_f32_to_f16(builder, level, simd.emit_splat(builder, args[1]))
                half = builder.extract_element(halves, simd.I32(0))
            else:
                half = builder.fptrunc(args[1], simd.F16)
            simd.emit_store(builder, args[0], half, 2)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32), codegen

    return store_half


@kernel_family
def rope_store(level: str, head_size: int) -> Callable[..., None]:
    """Rotate the pairs (2i, 2i + 1) of queries and keys; keys and values go into the cache as float16."""
    store_half = _store_half(level)
    key_bytes = head_size * BLOCK * 2
    head_bytes = 2 * key_bytes

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        pairs = load_i64(op + A_PAIRS)
        q_heads = load_i64(op + A_Q_HEADS)
        kv_heads = load_i64(op + A_KV_HEADS)
        rotated_stride = load_i64(op + A_ROTATED_STRIDE)
        rotated0 = load_i64(op + A_ROTATED) + private_row(op, step, thread, PRIVATE_OUTPUT) * rotated_stride
        row = first_item(op, step)
        while row < rows:
            rotation = load_i64(step + records.STEP_ROTATIONS) + row * 8 * pairs
            q = load_i64(op + A_Q) + row * load_i64(op + A_Q_STRIDE)
            k = load_i64(op + A_K) + row * load_i64(op + A_K_STRIDE)
            v = load_i64(op + A_V) + row * load_i64(op + A_V_STRIDE)
            rotated = rotated0 + row * rotated_stride
            for head in range(q_heads):
                for pair in range(head_size // 2):
                    at = 4 * (head * head_size + 2 * pair)
                    x0 = load_f32(q + at)
                    x1 = load_f32(q + at + 4)
                    if pair < pairs:
                        cosine = load_f32(rotation + 8 * pair)
                        sine = load_f32(rotation + 8 * pair + 4)
                        store_f32(rotated + at, x0 * cosine - x1 * sine)
                        store_f32(rotated + at + 4, x0 * sine + x1 * cosine)
                    else:
                        store_f32(rotated + at, x0)
                        store_f32(rotated + at + 4, x1)
            position = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row)
            table = load_i64(load_i64(step + records.STEP_TABLES) + 8 * row)
            slot = position % BLOCK
            block = load_i64(op + A_CACHE) + load_i32(table + 4 * (position // BLOCK)) * load_i64(op + A_BLOCK_BYTES)
            for head in range(kv_heads):
                keys = block + head * head_bytes + 2 * slot
                for pair in range(head_size // 2):
                    at = 4 * (head * head_size + 2 * pair)
                    x0 = load_f32(k + at)
                    x1 = load_f32(k + at + 4)
                    y0 = x0
                    y1 = x1
                    if pair < pairs:
                        cosine = load_f32(rotation + 8 * pair)
                        sine = load_f32(rotation + 8 * pair + 4)
                        y0 = x0 * cosine - x1 * sine
                        y1 = x0 * sine + x1 * cosine
                    store_half(keys + 2 * BLOCK * (2 * pair), y0)
                    store_half(keys + 2 * BLOCK * (2 * pair + 1), y1)
                values = block + head * head_bytes + key_bytes + 2 * head_size * slot
                for feature in range(head_size):
                    store_half(values + 2 * feature, load_f32(v + 4 * (head * head_size + feature)))
            row = next_item(op, step, row)

    return run


def rope_reference(x: NDArray[np.float32], rotations: NDArray[np.float32]) -> NDArray[np.float32]:
    """x float32[rows, heads, head size], rotations float32[rows, pairs, 2] (cosine, sine); returns x's shape."""
    y = x.copy()
    pairs = rotations.shape[1]
    cosine, sine = rotations[:, None, :, 0], rotations[:, None, :, 1]
    even, odd = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    y[..., 0 : 2 * pairs : 2] = even * cosine - odd * sine
    y[..., 1 : 2 * pairs : 2] = even * sine + odd * cosine
    return y


# --- attention -----------------------------------------------------------------------------------------------------

A_QUERY, A_QUERY_STRIDE, A_OUT, A_OUT_STRIDE, A_KV, A_KV_BLOCK_BYTES, A_HEADS, A_GROUP, A_SCALE = (
    ARG + 8 * i for i in range(9)
)
A_SCRATCH, A_SCRATCH_BYTES = (ARG + 8 * i for i in range(9, 11))


@kernel_family
def attention(level: str, head_size: int) -> Callable[..., None]:
    """Causal attention; an item is a row and one of its KV heads, with the query heads that share it.

    SCRATCH holds per thread the 32 weights of a block. HEADS counts KV heads, GROUP the query heads of each.
    """
    operations = simd.Operations(level)
    fma, exp, load_f16x16 = operations.fma, operations.exp, operations.load_f16x16
    key_bytes = head_size * BLOCK * 2
    head_bytes = 2 * key_bytes
    minus_infinity = -3.0e38

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        kv_heads = load_i64(op + A_HEADS)
        group = load_i64(op + A_GROUP)
        items = n_rows(op, step) * kv_heads
        query_stride = load_i64(op + A_QUERY_STRIDE)
        query0 = load_i64(op + A_QUERY) + private_row(op, step, thread, PRIVATE_INPUT) * query_stride
        scale = simd.splat(load_f32(op + A_SCALE))
        weights = load_i64(op + A_SCRATCH) + thread * load_i64(op + A_SCRATCH_BYTES)
        cache = load_i64(op + A_KV)
        block_bytes = load_i64(op + A_KV_BLOCK_BYTES)
        lowest = types.float32(minus_infinity)
        zero = simd.splat(types.float32(0))
        item = claim(op)
        while item < items:
            row = item // kv_heads
            kv_head = item % kv_heads
            table = load_i64(load_i64(step + records.STEP_TABLES) + 8 * row)
            length = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row) + 1
            for head in range(kv_head * group, (kv_head + 1) * group):
                query = query0 + row * query_stride + 4 * head * head_size
                out = load_i64(op + A_OUT) + row * load_i64(op + A_OUT_STRIDE) + 4 * head * head_size
                for feature in range(0, 4 * head_size, 64):
                    simd.store_f32x16(out + feature, zero)
                largest = lowest
                total = types.float32(0)
                for index in range((length + BLOCK - 1) // BLOCK):
                    keys = cache + load_i32(table + 4 * index) * block_bytes + kv_head * head_bytes
                    values = keys + key_bytes
                    valid = min(BLOCK, length - BLOCK * index)
                    low = zero
                    high = zero
                    for feature in range(head_size):
                        q = simd.splat(load_f32(query + 4 * feature))
                        low = fma(q, load_f16x16(keys + 64 * feature), low)
                        high = fma(q, load_f16x16(keys + 64 * feature + 32), high)
                    low = simd.keep_first(simd.multiply(low, scale), valid, lowest)
                    high = simd.keep_first(simd.multiply(high, scale), valid - 16, lowest)
                    best = max(largest, simd.max_lanes(simd.maximum(low, high)))
                    low = simd.keep_first(exp(simd.subtract(low, simd.splat(best))), valid, types.float32(0))
                    high = simd.keep_first(exp(simd.subtract(high, simd.splat(best))), valid - 16, types.float32(0))
                    faded = exp(simd.splat(largest - best))
                    simd.store_f32x16(weights, low)
                    simd.store_f32x16(weights + 64, high)
                    total = total * simd.first_lane(faded) + simd.sum_lanes(simd.add(low, high))
                    largest = best
                    for feature in range(0, head_size, 16):
                        sums = simd.multiply(simd.load_f32x16(out + 4 * feature), faded)
                        value = values + 2 * feature
                        for position in range(valid):
                            weight = simd.splat(load_f32(weights + 4 * position))
                            sums = fma(weight, load_f16x16(value + 2 * head_size * position), sums)
                        simd.store_f32x16(out + 4 * feature, sums)
                inverse = simd.splat(types.float32(1) / total)
                for feature in range(0, 4 * head_size, 64):
                    simd.store_f32x16(out + feature, simd.multiply(simd.load_f32x16(out + feature), inverse))
            item = claim(op)

    return run


def attention_reference(
    q: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], scale: float
) -> NDArray[np.float32]:
    """One row: q float32[heads, head size], keys and values float32[length, KV heads, head size], the row's own
    position last; returns float32[heads, head size]. A plain softmax, exact where the kernel's runs in blocks."""
    import numpy as np

    group = len(q) // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("hd,lhd->hl", q, keys, dtype=np.float32) * np.float32(scale)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    result: NDArray[np.float32] = np.einsum("hl,lhd->hd", weights, values, dtype=np.float32)
    return result
