"""Row-wise ops: activations, sums, concatenations and slices of rows, and the soft cap on logits.

All of them except the soft cap are cheap, so in a step of one row every thread computes the whole row (records.py).
Slices and concatenations both copy parts of rows.

Rows are padded with zeros to whole vectors. All of the element-wise ops map zeros to zeros, except a sigmoid that is
not multiplied by anything: its width must be a whole number of vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from llmrun.formats.layouts import records
from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code import curves, simd
from llmrun.kernels.code.load_store import copy_bytes, load_f32, load_i64
from llmrun.kernels.code.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    PRIVATE_SECOND,
    PRIVATE_THIRD,
    claim,
    first_item,
    n_rows,
    next_item,
    private_row,
)
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.model.plan.ops.activations import (
    CLAMP,
    CLAMPED_SLOPE,
    GELU_CUBIC,
    GELU_QUICK_SLOPE,
    GELU_SLOPE,
    Activation,
    GatedWords,
    XieluWords,
)
from llmrun.model.plan.ops.rows import AddWords, ClampWords, ConcatWords, SoftCapWords

_CONCAT = offsets(ConcatWords)


@kernel
def concat(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Write the parts of each row.

    Part i consists of `a_bytes` bytes from `a + i * a_step`, then `b_bytes` bytes from `b + i * b_step`.
    """
    rows, parts = n_rows(op, step), load_i64(op + _CONCAT.parts)
    a_stride, a_step = load_i64(op + _CONCAT.a_stride), load_i64(op + _CONCAT.a_step)
    a_bytes = load_i64(op + _CONCAT.a_bytes)
    b_stride, b_step = load_i64(op + _CONCAT.b_stride), load_i64(op + _CONCAT.b_step)
    b_bytes = load_i64(op + _CONCAT.b_bytes)
    stride = load_i64(op + _CONCAT.out_stride)
    a0 = load_i64(op + _CONCAT.a) + private_row(op, step, thread, PRIVATE_INPUT) * a_stride
    b0 = load_i64(op + _CONCAT.b) + private_row(op, step, thread, PRIVATE_SECOND) * b_stride
    out0 = load_i64(op + _CONCAT.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * stride
    row = first_item(op, step, thread, n_threads, rows)
    while row < rows:
        to = out0 + row * stride
        for part in range(parts):
            copy_bytes(to, a0 + row * a_stride + part * a_step, a_bytes)
            copy_bytes(to + a_bytes, b0 + row * b_stride + part * b_step, b_bytes)
            to += a_bytes + b_bytes
        row = next_item(op, step, row, n_threads, rows)


_GATED = offsets(GatedWords)
_XIELU = offsets(XieluWords)
_ADD = offsets(AddWords)
_CLAMP = offsets(ClampWords)
_CAP = offsets(SoftCapWords)

# --- activations -----------------------------------------------------------------------------------------------------


@kernel_family
def gated(level: str, activation: str) -> Callable[..., None]:
    """Build the kernel that computes y = activation(gate) * up.

    If `up` is a row of ones with stride 0, this is y = activation(gate).
    """
    activate = _activations(level)[Activation(activation)]

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        gate_stride = load_i64(op + _GATED.gate_stride)
        up_stride = load_i64(op + _GATED.up_stride)
        y_stride = load_i64(op + _GATED.out_stride)
        gate0 = load_i64(op + _GATED.gate) + private_row(op, step, thread, PRIVATE_INPUT) * gate_stride
        up0 = load_i64(op + _GATED.up) + private_row(op, step, thread, PRIVATE_SECOND) * up_stride
        y0 = load_i64(op + _GATED.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
        width = load_i64(op + _GATED.width)
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            gate = gate0 + row * gate_stride
            up = up0 + row * up_stride
            y = y0 + row * y_stride
            for at in range(0, 4 * width, 64):
                simd.store_f32x16(y + at, activate(simd.load_f32x16(gate + at), simd.load_f32x16(up + at)))
            row = next_item(op, step, row, n_threads, rows)

    return run


def _activations(level: str) -> dict[Activation, Any]:
    """Return the functions that apply each activation to 16 values of `gate` and 16 values of `up`."""
    sigmoid, tanh_of, normal = curves.sigmoid(level), curves.tanh(level), curves.normal_distribution(level)

    @inline_function
    def none(gate: Any, up: Any) -> Any:
        return simd.multiply(gate, up)

    @inline_function
    def tanh(gate: Any, up: Any) -> Any:
        return simd.multiply(tanh_of(gate), up)

    @inline_function
    def silu(gate: Any, up: Any) -> Any:
        return simd.multiply(simd.multiply(gate, sigmoid(gate)), up)

    @inline_function
    def gate_only(gate: Any, up: Any) -> Any:
        return simd.multiply(sigmoid(gate), up)

    @inline_function
    def relu(gate: Any, up: Any) -> Any:
        return simd.multiply(simd.select_negative(gate, simd.splat(types.float32(0)), gate), up)  # preserves NaN

    @inline_function
    def relu_squared(gate: Any, up: Any) -> Any:
        positive = simd.select_negative(gate, simd.splat(types.float32(0)), gate)
        return simd.multiply(simd.multiply(positive, positive), up)

    @inline_function
    def gelu(gate: Any, up: Any) -> Any:
        # This computes (1 + tanh(u)) / 2 as sigmoid(2u), which stays precise where tanh(u) is near -1.
        cube = simd.multiply(simd.multiply(simd.multiply(simd.splat(types.float32(GELU_CUBIC)), gate), gate), gate)
        doubled = simd.multiply(simd.splat(types.float32(2 * GELU_SLOPE)), simd.add(gate, cube))
        return simd.multiply(simd.multiply(gate, sigmoid(doubled)), up)

    @inline_function
    def gelu_erf(gate: Any, up: Any) -> Any:
        return simd.multiply(simd.multiply(gate, normal(gate)), up)

    @inline_function
    def gelu_quick(gate: Any, up: Any) -> Any:
        slope = simd.splat(types.float32(GELU_QUICK_SLOPE))
        return simd.multiply(simd.multiply(gate, sigmoid(simd.multiply(slope, gate))), up)

    @inline_function
    def clamped_silu(gate: Any, up: Any) -> Any:
        most, least = simd.splat(types.float32(CLAMP)), simd.splat(types.float32(-CLAMP))
        # Unlike minimum and maximum, these selections preserve NaN.
        gate = simd.select_negative(simd.subtract(most, gate), most, gate)
        up = simd.select_negative(simd.subtract(most, up), most, up)
        up = simd.select_negative(simd.subtract(up, least), least, up)
        slope = simd.splat(types.float32(CLAMPED_SLOPE))
        silu = simd.multiply(gate, sigmoid(simd.multiply(slope, gate)))
        return simd.multiply(silu, simd.add(up, simd.splat(types.float32(1))))

    return {
        Activation.NONE: none,
        Activation.TANH: tanh,
        Activation.SILU: silu,
        Activation.SIGMOID: gate_only,
        Activation.RELU: relu,
        Activation.RELU_SQUARED: relu_squared,
        Activation.GELU: gelu,
        Activation.GELU_ERF: gelu_erf,
        Activation.GELU_QUICK: gelu_quick,
        Activation.CLAMPED_SILU: clamped_silu,
    }


@kernel_family
def xielu(level: str) -> Callable[..., None]:
    """Build the kernel of Xielu (plan/ops/activations.py).

    exp(x) - 1 is computed as 2 t / (1 - t) with t = tanh(x / 2), which does not cancel near 0.
    """
    tanh = curves.tanh(level)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        x_stride, y_stride = load_i64(op + _XIELU.x_stride), load_i64(op + _XIELU.out_stride)
        x0 = load_i64(op + _XIELU.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        y0 = load_i64(op + _XIELU.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
        half, one = simd.splat(types.float32(0.5)), simd.splat(types.float32(1))
        positive, negative = simd.splat(load_f32(op + _XIELU.positive)), simd.splat(load_f32(op + _XIELU.negative))
        slope, least = simd.splat(load_f32(op + _XIELU.slope)), simd.splat(load_f32(op + _XIELU.least))
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            for at in range(0, 4 * load_i64(op + _XIELU.width), 64):
                x = simd.load_f32x16(x0 + row * x_stride + at)
                t = tanh(simd.multiply(half, simd.select_negative(simd.subtract(x, least), x, least)))
                grown = simd.divide(simd.add(t, t), simd.subtract(one, t))
                below = simd.multiply(negative, simd.subtract(grown, x))
                above = simd.multiply(positive, simd.multiply(x, x))
                curved = simd.select_negative(x, below, above)
                simd.store_f32x16(y0 + row * y_stride + at, simd.add(curved, simd.multiply(slope, x)))
            row = next_item(op, step, row, n_threads, rows)

    return run


@kernel_family
def clamp(level: str) -> Callable[..., None]:
    """Build the kernel that computes min(max(x, least), most). NaN stays NaN."""

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        x_stride, y_stride = load_i64(op + _CLAMP.x_stride), load_i64(op + _CLAMP.out_stride)
        x0 = load_i64(op + _CLAMP.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        y0 = load_i64(op + _CLAMP.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
        least, most = simd.splat(load_f32(op + _CLAMP.least)), simd.splat(load_f32(op + _CLAMP.most))
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            for at in range(0, 4 * load_i64(op + _CLAMP.width), 64):
                x = simd.load_f32x16(x0 + row * x_stride + at)
                x = simd.select_negative(simd.subtract(most, x), most, x)
                simd.store_f32x16(y0 + row * y_stride + at, simd.select_negative(simd.subtract(x, least), least, x))
            row = next_item(op, step, row, n_threads, rows)

    return run


# --- sums ------------------------------------------------------------------------------------------------------------


@kernel_family
def add(level: str) -> Callable[..., None]:
    """Build the kernel that computes sum = x + factor * y.

    If there is a gate, the factor of each row is the sigmoid of its gate, or, if `is_plain` is set, the gate plus
    `factor`. The sum may overwrite x. The product
    and the sum are rounded separately at every instruction-set level, so that all levels give the same result.
    """
    sigmoid = curves.sigmoid(level)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        sum_stride = load_i64(op + _ADD.out_stride)
        x_stride = load_i64(op + _ADD.x_stride)
        y_stride = load_i64(op + _ADD.y_stride)
        gate_stride = load_i64(op + _ADD.gate_stride)
        sum0 = load_i64(op + _ADD.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * sum_stride
        x0 = load_i64(op + _ADD.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        y0 = load_i64(op + _ADD.y) + private_row(op, step, thread, PRIVATE_SECOND) * y_stride
        gate0 = load_i64(op + _ADD.gate) + private_row(op, step, thread, PRIVATE_THIRD) * gate_stride
        gate0 += load_i64(op + _ADD.gate_at)
        width = load_i64(op + _ADD.width)
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            total = sum0 + row * sum_stride
            x = x0 + row * x_stride
            y = y0 + row * y_stride
            factor = simd.splat(load_f32(op + _ADD.factor))
            if load_i64(op + _ADD.gate) != 0:
                gate = simd.splat(load_f32(gate0 + row * gate_stride))
                factor = simd.add(factor, gate) if load_i64(op + _ADD.is_plain) != 0 else sigmoid(gate)
            for at in range(0, 4 * width, 64):
                scaled = simd.multiply(factor, simd.load_f32x16(y + at))
                simd.store_f32x16(total + at, simd.add(simd.load_f32x16(x + at), scaled))
            row = next_item(op, step, row, n_threads, rows)

    return run


# --- the soft cap on logits ------------------------------------------------------------------------------------------

CAP_CHUNK = 4096  # logits per work item


@kernel_family
def soft_cap(level: str) -> Callable[..., None]:
    """Build the kernel that computes logits = cap * tanh(logits / cap), in place.

    Each row is divided among the threads, because a vocabulary may have 262,144 tokens.
    """
    tanh = curves.tanh(level)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        width = load_i64(op + _CAP.width)
        chunks = (width + CAP_CHUNK - 1) // CAP_CHUNK
        items = n_rows(op, step) * chunks
        cap = simd.splat(load_f32(op + _CAP.cap))
        item = claim(op)
        while item < items:
            start = item % chunks * CAP_CHUNK
            end = min(width, start + CAP_CHUNK)
            x = load_i64(step + records.STEP_LOGITS) + item // chunks * load_i64(op + _CAP.stride)
            for at in range(4 * start, 4 * end, 64):
                value = simd.divide(simd.load_f32x16(x + at), cap)
                simd.store_f32x16(x + at, simd.multiply(cap, tanh(value)))
            item = claim(op)

    return run
