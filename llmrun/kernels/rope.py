"""Rotary positions, and the paged KV cache's layout.

The cache of a layer is an array of blocks of 32 positions; block b of KV head h holds keys float16[head size, 32] and
then values float16[32, head size], so that both products of attention run along vectors of positions or of features. A
row's block table says which block holds its positions 32i to 32i + 31.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba import types
from numba.extending import intrinsic

from llmrun.kernels import records, simd
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.memory import load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.work import PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS
BLOCK = 32  # positions in a block of the KV cache

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
