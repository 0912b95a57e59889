"""Kernels that compare the features of a row with its length or its spread: MatchLength and CutOff.

In a step of one row, every thread computes the whole row (records.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_f32, load_i64
from llmrun.kernels.code.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    PRIVATE_SECOND,
    first_item,
    n_rows,
    next_item,
    private_row,
)
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.rows.norms import root
from llmrun.model.plan.ops.norms import LEAST_SQUARES, CutOffWords, MatchLengthWords

_MATCH = offsets(MatchLengthWords)
_CUT = offsets(CutOffWords)


@kernel_family
def match_length(level: str) -> Callable[..., None]:
    """Build the kernel that computes y = x * |like| / |x|."""
    fma = simd.Operations(level).fma

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        width = load_i64(op + _MATCH.width)
        x_stride, like_stride = load_i64(op + _MATCH.x_stride), load_i64(op + _MATCH.like_stride)
        y_stride = load_i64(op + _MATCH.out_stride)
        x0 = load_i64(op + _MATCH.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        like0 = load_i64(op + _MATCH.like) + private_row(op, step, thread, PRIVATE_SECOND) * like_stride
        y0 = load_i64(op + _MATCH.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            x, like, y = x0 + row * x_stride, like0 + row * like_stride, y0 + row * y_stride
            ours, theirs = simd.splat(types.float32(0)), simd.splat(types.float32(0))
            for at in range(0, 4 * width, 64):
                value, other = simd.load_f32x16(x + at), simd.load_f32x16(like + at)
                ours, theirs = fma(value, value, ours), fma(other, other, theirs)
            squares = max(simd.sum_lanes(ours), types.float32(LEAST_SQUARES))
            scale = simd.splat(root(simd.sum_lanes(theirs) / squares))
            for at in range(0, 4 * width, 64):
                simd.store_f32x16(y + at, simd.multiply(simd.load_f32x16(x + at), scale))
            row = next_item(op, step, row, n_threads, rows)

    return run


@kernel_family
def cut_off(level: str) -> Callable[..., None]:
    """Build the kernel that computes y = max(x - cutoff, 0), where mean and standard deviation determine the cutoff."""
    fma = simd.Operations(level).fma

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        width, deviations = load_i64(op + _CUT.width), load_f32(op + _CUT.deviations)
        x_stride, y_stride = load_i64(op + _CUT.x_stride), load_i64(op + _CUT.out_stride)
        x0 = load_i64(op + _CUT.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        y0 = load_i64(op + _CUT.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
        zero = types.float32(0)
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            x, y = x0 + row * x_stride, y0 + row * y_stride
            total = simd.splat(zero)
            for at in range(0, 4 * width, 64):
                total = simd.add(total, simd.load_f32x16(x + at))
            mean = simd.sum_lanes(total) / types.float32(width)
            squares = simd.splat(zero)
            for at in range(0, 4 * width, 64):
                # Exclude the padding, which is no longer zero after the mean is subtracted.
                distance = simd.subtract(simd.load_f32x16(x + at), simd.splat(mean))
                distance = simd.keep_between(distance, 0, width - at // 4, zero)
                squares = fma(distance, distance, squares)
            deviation = root(simd.sum_lanes(squares) / types.float32(width - 1))
            cutoff = simd.splat(mean + deviation * deviations)
            for at in range(0, 4 * width, 64):
                above = simd.subtract(simd.load_f32x16(x + at), cutoff)
                above = simd.select_negative(above, simd.splat(zero), above)  # preserves NaN
                simd.store_f32x16(y + at, simd.keep_between(above, 0, width - at // 4, zero))
            row = next_item(op, step, row, n_threads, rows)

    return run
