"""The causal convolution of recurrent layers, whose state is a ring buffer of the last inputs.

The threads divide the features, and a thread processes all rows of a run in order. It first computes the outputs, which
depend on the inputs of earlier rows in the step and in the ring buffer. Then it stores the inputs for later steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmrun.formats.layouts import kv
from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code import curves, simd
from llmrun.kernels.code.load_store import copy_bytes, load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, first_item, next_item, private_row
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.recurrent.recurrences import n_runs, row_of_run, run_address
from llmrun.model.plan.ops.convolution import CONVOLVED_FEATURES, CausalConvolutionWords

_CONV = offsets(CausalConvolutionWords)
_CHUNK = 4 * CONVOLVED_FEATURES  # bytes of a row that a work item processes


@inline_function
def _ring_row(op: Any, run: Any, position: Any) -> Any:
    """Return the address of the stored input of a position."""
    state = load_i64(op + _CONV.state) + load_i64(run + kv.RUN_SEQUENCE) * load_i64(op + _CONV.state_bytes)
    return state + position % load_i64(op + _CONV.ring_rows) * 4 * load_i64(op + _CONV.width)


@inline_function
def _target(op: Any, at: Any, row: Any) -> Any:
    """Return the address of the output of a row for the feature at byte `at`."""
    if at >= load_i64(op + _CONV.third):
        out = load_i64(op + _CONV.third_out) + row * load_i64(op + _CONV.third_stride)
        return out + at - load_i64(op + _CONV.third)
    if at >= load_i64(op + _CONV.second):
        out = load_i64(op + _CONV.second_out) + row * load_i64(op + _CONV.second_stride)
        return out + at - load_i64(op + _CONV.second)
    return load_i64(op + _CONV.out) + row * load_i64(op + _CONV.out_stride) + at


@inline_function
def _store_inputs(op: Any, step: Any, run: Any, x0: Any, first: Any, end: Any) -> None:
    """Store the inputs on which rows after the new base depend, from byte `first` to byte `end`."""
    start = load_i64(run + kv.RUN_START)
    oldest = load_i64(run + kv.RUN_COMMIT) - load_i64(op + _CONV.taps) + 1
    for index in range(max(oldest - start, 0), load_i64(run + kv.RUN_ROWS)):
        x = x0 + row_of_run(step, run, index) * load_i64(op + _CONV.x_stride)
        copy_bytes(_ring_row(op, run, start + index) + first, x + first, end - first)


@kernel_family
def causal_convolution(level: str) -> Callable[..., None]:
    """Build the kernel of CausalConvolution (plan/ops/convolution.py). It adds the bias, then the taps in order."""
    sigmoid = curves.sigmoid(level)

    @inline_function
    def convolve(op: Any, step: Any, run: Any, x0: Any, index: Any, first: Any, end: Any, sums: Any) -> None:
        """Compute the output of the run's row `index`, from byte `first` to byte `end`. `sums` is scratch memory."""
        taps = load_i64(op + _CONV.taps)
        start = load_i64(run + kv.RUN_START)
        for at in range(first, end, 64):
            simd.store_f32x16(sums + at - first, simd.load_f32x16(load_i64(op + _CONV.bias) + at))
        for tap in range(taps):
            earlier = index + tap - taps + 1
            if start + earlier < 0:
                continue  # inputs before the first position are 0
            x = _ring_row(op, run, start + earlier)
            if earlier >= 0:
                x = x0 + row_of_run(step, run, earlier) * load_i64(op + _CONV.x_stride)
            weight = load_i64(op + _CONV.weight) + tap * 4 * load_i64(op + _CONV.width)
            for at in range(first, end, 64):
                product = simd.multiply(simd.load_f32x16(x + at), simd.load_f32x16(weight + at))
                simd.store_f32x16(sums + at - first, simd.add(simd.load_f32x16(sums + at - first), product))
        row = row_of_run(step, run, index)
        for at in range(first, end, 64):
            total = simd.load_f32x16(sums + at - first)
            simd.store_f32x16(_target(op, at, row), simd.multiply(total, sigmoid(total)))

    @kernel
    def run_kernel(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        row_bytes = 4 * load_i64(op + _CONV.width)
        x0 = load_i64(op + _CONV.x) + private_row(op, step, thread, PRIVATE_INPUT) * load_i64(op + _CONV.x_stride)
        sums = load_i64(op + _CONV.scratch) + thread * _CHUNK
        chunks = (row_bytes + _CHUNK - 1) // _CHUNK
        items = n_runs(step) * chunks
        item = first_item(op, step, thread, n_threads, items)
        while item < items:
            run = run_address(step, item // chunks)
            first = item % chunks * _CHUNK
            end = min(first + _CHUNK, row_bytes)
            for index in range(load_i64(run + kv.RUN_ROWS)):
                convolve(op, step, run, x0, index, first, end, sums)
            _store_inputs(op, step, run, x0, first, end)
            item = next_item(op, step, item, n_threads, items)

    return run_kernel
