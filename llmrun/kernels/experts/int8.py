"""Matrix products with the experts' integer matrices. Results are the same as in linear/int8.py.

If many rows use an expert, its weights are unpacked once for all of these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmrun.formats.layouts.linear import PACKED_TYPES, many_rows, tile_shape
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import claim
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.experts.items import expert_items
from llmrun.kernels.linear.parts import NUMBERED, PRODUCT, linear_parts, prefetch_way
from llmrun.kernels.linear.tiles import tile


@kernel_family
def experts(level: str, weight: str) -> Callable[..., None]:
    """Build the kernel for a weight type, given as a key of PACKED_TYPES."""
    packed = PACKED_TYPES[weight]
    groups, tile_rows = tile_shape(level)
    head_of, n_items, expert_of, source_of, numbers_at = expert_items(PRODUCT)
    parts = linear_parts(level, packed, NUMBERED)
    unpack_group, multiply_row, multiply_rows, row_of, ahead_of, prefetch_weights = parts
    tile_zero, _, tile_block, tile_store = tile(level, packed, groups, tile_rows)
    panel_block = packed.panel_block_bytes
    threshold = many_rows(level)

    @inline_function
    def multiply_tile(op: Any, panel: Any, panel_bytes: Any, slot: Any, group: Any, n_here: Any) -> Any:
        """Multiply a tile of rows, starting at `slot`, by the panels of `n_here` groups, starting at `group`."""
        x, x_stride = row_of(op, 0), load_i64(op + PRODUCT.x_stride)
        numbers = numbers_at(op, slot)
        totals = tile_zero()
        for block in range(load_i64(op + PRODUCT.blocks)):
            totals = tile_block(totals, block, panel + block * panel_block, panel_bytes, x, x_stride, numbers)
        y_stride = load_i64(op + PRODUCT.out_stride)
        for index in range(n_here):
            to = load_i64(op + PRODUCT.out) + slot * y_stride + 64 * (group + index)
            tile_store(totals, index, to, y_stride, load_i64(op + PRODUCT.adds))

    @inline_function
    def multiply_many(
        op: Any, thread: Any, before: Any, first: Any, end: Any, start: Any, stop: Any, following: Any
    ) -> Any:
        """Multiply the rows in slots `first` to `end` by groups `start` to `stop` of an expert.

        It also prefetches the next weights. `before` is the number of groups that belong to earlier experts.
        """
        panel_bytes = load_i64(op + PRODUCT.blocks) * panel_block
        panel = load_i64(op + PRODUCT.panels) + thread * load_i64(op + PRODUCT.panels_stride)
        n_tiles = (end - first + tile_rows - 1) // tile_rows
        for group in range(start, stop, groups):
            n_here = min(groups, stop - group)
            for index in range(n_here):
                unpack_group(op, before + group + index, panel + index * panel_bytes)
            next_group = before + group + groups
            if group + groups >= stop:
                next_group = following
            for number in range(n_tiles):
                prefetch_weights(op, next_group, groups, number, n_tiles)
                # The last tile starts early enough to be full. Rows in both this tile and the previous one are computed
                # twice, with the same result.
                slot = min(first + number * tile_rows, end - tile_rows)
                multiply_tile(op, panel, panel_bytes, slot, group, n_here)

    @inline_function
    def multiply_few(
        op: Any,
        step: Any,
        thread: Any,
        before: Any,
        first: Any,
        end: Any,
        start: Any,
        stop: Any,
        following: Any,
    ) -> Any:
        y_stride, n_blocks = load_i64(op + PRODUCT.out_stride), load_i64(op + PRODUCT.blocks)
        ahead, advance, stride = ahead_of(op, prefetch_way(step, end - first), before + start, following)
        for group in range(start, stop):
            to = load_i64(op + PRODUCT.out) + first * y_stride + 64 * group
            if end - first == 1:
                multiply_row(op, before + group, source_of(op, step, thread, first), to, ahead, advance, stride)
            else:
                multiply_rows(op, before + group, numbers_at(op, first), end - first, to, ahead, advance, stride)
            ahead += n_blocks * advance

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        head = head_of(op, step, thread)
        n_groups = load_i64(op + PRODUCT.groups)
        end_item = n_items(op, head)
        item = claim(op)
        while item < end_item:
            # The next item is claimed early, so that its weights can be prefetched at the end of the current one.
            next_item = claim(op)
            expert, first, end, start, stop = expert_of(op, head, item)
            following = expert * n_groups + start
            if next_item < end_item:
                next_expert, _, _, next_start, _ = expert_of(op, head, next_item)
                following = next_expert * n_groups + next_start
            if end - first < threshold:
                multiply_few(op, step, thread, expert * n_groups, first, end, start, stop, following)
            else:
                multiply_many(op, thread, expert * n_groups, first, end, start, stop, following)
            item = next_item

    return run
