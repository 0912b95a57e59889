"""Rotary positions, and keys and values on their way into the KV cache (kv_blocks.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.attention.hadamard import spreading
from llmrun.kernels.attention.kv_store import storing
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.code.work import (
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
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.layouts import records
from llmrun.layouts.kv_blocks import BLOCK, Q8_0, HeadLayout
from llmrun.plan.rope import Pairing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS

A_Q, A_Q_STRIDE, A_ROTATED, A_ROTATED_STRIDE, A_Q_HEADS = (ARG + 8 * i for i in range(5))
# Pairs that are rotated; where their rotations begin in a row's, and bytes of a row's; bytes from a pair to the next,
# and from a pair's first feature to its second.
A_PAIRS, A_ROTATION, A_ROTATION_STRIDE, A_PAIR_STEP, A_PAIR_GAP = (ARG + 8 * i for i in range(5, 10))
# Of rope_store alone: A_KEY_ROTATION is A_ROTATION of keys, A_TABLES which of the plan's windows.
A_K, A_K_STRIDE, A_V, A_V_STRIDE, A_KV_HEADS, A_KEY_ROTATION = (ARG + 8 * i for i in range(10, 16))
A_CACHE, A_BLOCK_BYTES, A_TABLES, A_SCRATCH, A_SCRATCH_BYTES = (ARG + 8 * i for i in range(16, 21))


@kernel_family
def rope_store(level: str, head_size: int, value_size: int, kv_type: str) -> Callable[..., None]:
    """Rotate pairs of features of queries and keys, for q8_0 spread both; keys and values go into the cache."""
    layout = HeadLayout(kv_type, head_size, value_size)
    store_key, store_value = storing(level, layout)
    spread_key, _ = spreading(head_size)
    spreads, head_bytes = layout.has_scales, layout.n_bytes
    rotate, rotate_queries = _rotate(head_size), _rotate_queries(head_size, kv_type)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        rotated_stride = load_i64(op + A_ROTATED_STRIDE)
        rotated = load_i64(op + A_ROTATED) + private_row(op, step, thread, PRIVATE_OUTPUT) * rotated_stride
        rotated_key = load_i64(op + A_SCRATCH) + thread * load_i64(op + A_SCRATCH_BYTES)
        first_q = private_row(op, step, thread, PRIVATE_INPUT)
        first_k = private_row(op, step, thread, PRIVATE_SECOND)
        first_v = private_row(op, step, thread, PRIVATE_THIRD)
        tables = block_tables(step, load_i64(op + A_TABLES))
        row = first_item(op, step)
        while row < rows:
            rotations = load_i64(step + records.STEP_ROTATIONS) + row * load_i64(op + A_ROTATION_STRIDE)
            q = load_i64(op + A_Q) + (first_q + row) * load_i64(op + A_Q_STRIDE)
            k = load_i64(op + A_K) + (first_k + row) * load_i64(op + A_K_STRIDE)
            v = load_i64(op + A_V) + (first_v + row) * load_i64(op + A_V_STRIDE)
            rotate_queries(op, q, rotations, rotated + row * rotated_stride)
            rotation = rotations + load_i64(op + A_KEY_ROTATION)
            position = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row)
            table = load_i64(tables + 8 * row)
            slot = position % BLOCK
            block = load_i64(op + A_CACHE) + load_i32(table + 4 * (position // BLOCK)) * load_i64(op + A_BLOCK_BYTES)
            for head in range(load_i64(op + A_KV_HEADS)):
                rotate(op, k + 4 * head_size * head, rotation, rotated_key)
                if spreads:
                    spread_key(rotated_key)
                store_key(rotated_key, block + head * head_bytes, slot)
                store_value(v + 4 * value_size * head, block + head * head_bytes, slot)
            row = next_item(op, step, row)

    return run


@kernel_family
def rotate(head_size: int, kv_type: str) -> Callable[..., None]:
    """Queries alone, as `rope_store` has them."""
    rotate_queries = _rotate_queries(head_size, kv_type)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        q_stride = load_i64(op + A_Q_STRIDE)
        q = load_i64(op + A_Q) + private_row(op, step, thread, PRIVATE_INPUT) * q_stride
        rotated_stride = load_i64(op + A_ROTATED_STRIDE)
        rotated = load_i64(op + A_ROTATED) + private_row(op, step, thread, PRIVATE_OUTPUT) * rotated_stride
        row = first_item(op, step)
        while row < rows:
            rotations = load_i64(step + records.STEP_ROTATIONS) + row * load_i64(op + A_ROTATION_STRIDE)
            rotate_queries(op, q + row * q_stride, rotations, rotated + row * rotated_stride)
            row = next_item(op, step, row)

    return run


def _rotate_queries(head_size: int, kv_type: str) -> Any:
    """All heads of a row; `rotations`: of all the plan's ropes."""
    rotate = _rotate(head_size)
    _, spread_query = spreading(head_size)
    spreads = kv_type == Q8_0

    @inline_function
    def rotate_queries(op: Any, q: Any, rotations: Any, rotated: Any) -> Any:
        rotation = rotations + load_i64(op + A_ROTATION)
        for head in range(load_i64(op + A_Q_HEADS)):
            rotate(op, q + 4 * head_size * head, rotation, rotated + 4 * head_size * head)
            if spreads:
                spread_query(rotated + 4 * head_size * head)

    return rotate_queries


def _rotate(head_size: int) -> Any:
    """The features of one head, from one place to another: 16 pairs at a time, then the rest, and those of no pair."""
    rotate_adjacent, rotate_halves = _rotate_pairs(Pairing.ADJACENT), _rotate_pairs(Pairing.HALVES)

    @inline_function
    def rotate(op: Any, x: Any, rotation: Any, out: Any) -> Any:
        pairs = load_i64(op + A_PAIRS)
        step = load_i64(op + A_PAIR_STEP)
        gap = load_i64(op + A_PAIR_GAP)
        in_vectors = pairs // simd.LANES * simd.LANES
        if gap == 4:
            for pair in range(0, in_vectors, simd.LANES):
                rotate_adjacent(x + 8 * pair, rotation + 8 * pair, out + 8 * pair, gap)
        else:
            for pair in range(0, in_vectors, simd.LANES):
                rotate_halves(x + 4 * pair, rotation + 8 * pair, out + 4 * pair, gap)
        for pair in range(in_vectors, pairs):
            at = pair * step
            x0 = load_f32(x + at)
            x1 = load_f32(x + at + gap)
            cosine = load_f32(rotation + 8 * pair)
            sine = load_f32(rotation + 8 * pair + 4)
            store_f32(out + at, x0 * cosine - x1 * sine)
            store_f32(out + at + gap, x0 * sine + x1 * cosine)
        for feature in range(2 * pairs, head_size):
            store_f32(out + 4 * feature, load_f32(x + 4 * feature))

    return rotate


def _rotate_pairs(pairing: Pairing) -> Any:
    @intrinsic
    def rotate_pairs(typingctx: Any, x: Any, rotation: Any, out: Any, gap: Any) -> Any:
        """16 pairs; `gap` bytes from a pair's first feature to its second."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, rotation, out, gap = args
            cosine, sine = _emit_load_pairs(builder, rotation)
            if pairing is Pairing.ADJACENT:
                x0, x1 = _emit_load_pairs(builder, x)
            else:
                x0, x1 = (simd.emit_load(builder, at, simd.F32X16, 4) for at in (x, builder.add(x, gap)))
            y0 = builder.fsub(builder.fmul(x0, cosine), builder.fmul(x1, sine))
            y1 = builder.fadd(builder.fmul(x0, sine), builder.fmul(x1, cosine))
            if pairing is Pairing.ADJACENT:
                by_turns = [lane // 2 + simd.LANES * (lane % 2) for lane in range(2 * simd.LANES)]
                lanes = ir.Constant(ir.VectorType(simd.I32, 2 * simd.LANES), by_turns)
                simd.emit_store(builder, out, builder.shuffle_vector(y0, y1, lanes), 4)
            else:
                simd.emit_store(builder, out, y0, 4)
                simd.emit_store(builder, builder.add(out, gap), y1, 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return rotate_pairs


def _emit_load_pairs(builder: Any, address: Any) -> tuple[Any, Any]:
    """(first, second) of 16 pairs of floats that follow each other."""
    low, high = (simd.emit_load(builder, simd.emit_offset(builder, address, at), simd.F32X16, 4) for at in (0, 64))
    first, second = (
        ir.Constant(ir.VectorType(simd.I32, simd.LANES), list(range(start, 2 * simd.LANES, 2))) for start in (0, 1)
    )
    return builder.shuffle_vector(low, high, first), builder.shuffle_vector(low, high, second)


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
