"""Rotary positions, and keys and values on their way into the KV cache (kv_layout.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmrun.kernels import records
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.kv_layout import BLOCK, Q8_0, HeadLayout
from llmrun.kernels.kv_store import storing
from llmrun.kernels.memory import load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.rotations import Pairing
from llmrun.kernels.spread import spreading
from llmrun.kernels.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    PRIVATE_SECOND,
    PRIVATE_THIRD,
    block_tables,
    first_item,
    n_rows,
    next_item,
    private_row,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS

A_Q, A_Q_STRIDE, A_K, A_K_STRIDE, A_V, A_V_STRIDE, A_ROTATED, A_ROTATED_STRIDE = (ARG + 8 * i for i in range(8))
A_CACHE, A_BLOCK_BYTES, A_Q_HEADS, A_KV_HEADS, A_SCRATCH, A_SCRATCH_BYTES = (ARG + 8 * i for i in range(8, 14))
# Which of the plan's windows; pairs that are rotated; where their rotations begin in a row's, and bytes of a row's;
# bytes from a pair to the next, and from a pair's first feature to its second.
A_TABLES, A_PAIRS, A_ROTATION, A_ROTATION_STRIDE, A_PAIR_STEP, A_PAIR_GAP = (ARG + 8 * i for i in range(14, 20))


@kernel_family
def rope_store(level: str, head_size: int, kv_type: str) -> Callable[..., None]:
    """Rotate pairs of features of queries and keys, for q8_0 spread both; keys and values go into the cache."""
    store_key, store_value = storing(level, head_size, kv_type)
    spread_key, spread_query = spreading(head_size)
    spreads = kv_type == Q8_0
    head_bytes = HeadLayout.of(kv_type, head_size).n_bytes

    @inline_function
    def rotate(op: Any, x: Any, rotation: Any, out: Any) -> Any:
        pairs = load_i64(op + A_PAIRS)
        step = load_i64(op + A_PAIR_STEP)
        gap = load_i64(op + A_PAIR_GAP)
        for pair in range(pairs):
            at = pair * step
            x0 = load_f32(x + at)
            x1 = load_f32(x + at + gap)
            cosine = load_f32(rotation + 8 * pair)
            sine = load_f32(rotation + 8 * pair + 4)
            store_f32(out + at, x0 * cosine - x1 * sine)
            store_f32(out + at + gap, x0 * sine + x1 * cosine)
        for feature in range(2 * pairs, head_size):
            store_f32(out + 4 * feature, load_f32(x + 4 * feature))

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        rotated_stride = load_i64(op + A_ROTATED_STRIDE)
        rotated0 = load_i64(op + A_ROTATED) + private_row(op, step, thread, PRIVATE_OUTPUT) * rotated_stride
        rotated_key = load_i64(op + A_SCRATCH) + thread * load_i64(op + A_SCRATCH_BYTES)
        first_q = private_row(op, step, thread, PRIVATE_INPUT)
        first_k = private_row(op, step, thread, PRIVATE_SECOND)
        first_v = private_row(op, step, thread, PRIVATE_THIRD)
        tables = block_tables(step, load_i64(op + A_TABLES))
        row = first_item(op, step)
        while row < rows:
            rotation = load_i64(step + records.STEP_ROTATIONS) + row * load_i64(op + A_ROTATION_STRIDE)
            rotation += load_i64(op + A_ROTATION)
            q = load_i64(op + A_Q) + (first_q + row) * load_i64(op + A_Q_STRIDE)
            k = load_i64(op + A_K) + (first_k + row) * load_i64(op + A_K_STRIDE)
            v = load_i64(op + A_V) + (first_v + row) * load_i64(op + A_V_STRIDE)
            rotated = rotated0 + row * rotated_stride
            for head in range(load_i64(op + A_Q_HEADS)):
                rotate(op, q + 4 * head_size * head, rotation, rotated + 4 * head_size * head)
                if spreads:
                    spread_query(rotated + 4 * head_size * head)
            position = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row)
            table = load_i64(tables + 8 * row)
            slot = position % BLOCK
            block = load_i64(op + A_CACHE) + load_i32(table + 4 * (position // BLOCK)) * load_i64(op + A_BLOCK_BYTES)
            for head in range(load_i64(op + A_KV_HEADS)):
                rotate(op, k + 4 * head_size * head, rotation, rotated_key)
                if spreads:
                    spread_key(rotated_key)
                store_key(rotated_key, block + head * head_bytes, slot)
                store_value(v + 4 * head_size * head, block + head * head_bytes, slot)
            row = next_item(op, step, row)

    return run


def rope_reference(
    x: NDArray[np.float32], rotations: NDArray[np.float32], pairing: Pairing = Pairing.ADJACENT
) -> NDArray[np.float32]:
    """x float32[rows, heads, head size], rotations float32[rows, pairs, 2] (cosine, sine); returns x's shape."""
    y = x.copy()
    pairs = rotations.shape[1]
    cosine, sine = rotations[:, None, :, 0], rotations[:, None, :, 1]
    first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    if pairing is Pairing.HALVES:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    y[..., first] = x[..., first] * cosine - x[..., second] * sine
    y[..., second] = x[..., first] * sine + x[..., second] * cosine
    return y
