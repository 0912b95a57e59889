"""Matrix products with the experts' float matrices (F32, F16, BF16). Results are the same as in linear/floats.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmrun.formats.layouts.linear import FLOAT_BYTES
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import claim
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.experts.items import expert_items
from llmrun.kernels.linear.floats import PRODUCT, float_tile


@kernel_family
def experts(level: str, weight: str) -> Callable[..., None]:
    """Build the kernel for a weight type: "f32", "f16" or "bf16"."""
    element = FLOAT_BYTES[weight]
    head_of, n_items, expert_of, source_of, _ = expert_items(PRODUCT)
    zero, add_columns, store = float_tile(level, weight, 1)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        head = head_of(op, step, thread)
        n_groups, columns = load_i64(op + PRODUCT.groups), load_i64(op + PRODUCT.columns)
        y_stride = load_i64(op + PRODUCT.out_stride)
        end_item = n_items(op, head)
        item = claim(op)
        while item < end_item:
            expert, first, end, start, stop = expert_of(op, head, item)
            for group in range(start, stop):
                base = load_i64(op + PRODUCT.weights) + (expert * n_groups + group) * load_i64(op + PRODUCT.group_bytes)
                for slot in range(first, end):
                    x = load_i64(op + PRODUCT.x) + source_of(op, step, thread, slot) * load_i64(op + PRODUCT.x_stride)
                    total = zero()
                    for column in range(0, columns, 4):
                        total = add_columns(total, base + 16 * element * column, x + 4 * column, 0)
                    store(total, load_i64(op + PRODUCT.out) + slot * y_stride + 64 * group, y_stride, 0)
            item = claim(op)

    return run
