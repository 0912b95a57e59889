"""Matrix products with integer matrices: y[row, n] = sum over k of weight[n, k] * x[row, k].

Weights are packed in groups of 16 outputs (quants/weight_type.py). Rows are quantized to int8 in blocks of 32
(quantize.py). The dot products of a block, or of its halves, are exact integers. Blocks are added as floats in order of
k, so a result does not depend on the tile or on the thread that computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmrun.formats.layouts import records
from llmrun.formats.layouts.linear import PACKED_TYPES, many_rows, tile_shape
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, claim, n_rows, private_row
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.linear.parts import CONSECUTIVE, PRODUCT, linear_parts, prefetch_way
from llmrun.kernels.linear.tiles import tile


@kernel_family
def linear(level: str, weight: str) -> Callable[..., None]:
    """Build the kernel for a weight type, given as a key of PACKED_TYPES."""
    packed = PACKED_TYPES[weight]
    groups, tile_rows = tile_shape(level)
    parts = linear_parts(level, packed, CONSECUTIVE)
    unpack_group, multiply_row, multiply_rows, row_of, ahead_of, prefetch_weights = parts
    tile_zero, tile_block, _, tile_store = tile(level, packed, groups, tile_rows)
    panel_block = packed.panel_block_bytes
    threshold = many_rows(level)

    @inline_function
    def multiply_tile(op: Any, panel: Any, panel_bytes: Any, row: Any, group: Any, n_here: Any, y: Any) -> Any:
        """Multiply a tile of rows, starting at `row`, by the panels of `n_here` groups, starting at `group`."""
        x, x_stride = row_of(op, row), load_i64(op + PRODUCT.x_stride)
        totals = tile_zero()
        for block in range(load_i64(op + PRODUCT.blocks)):
            totals = tile_block(totals, block, panel + block * panel_block, panel_bytes, x, x_stride)
        y_stride = load_i64(op + PRODUCT.out_stride)
        for index in range(n_here):
            to = y + row * y_stride + 64 * (group + index)
            tile_store(totals, index, to, y_stride, load_i64(op + PRODUCT.adds))

    @inline_function
    def multiply_many(op: Any, rows: Any, thread: Any, y: Any) -> Any:
        n_groups = load_i64(op + PRODUCT.groups)
        n_tiles = rows // tile_rows
        panel_bytes, y_stride = load_i64(op + PRODUCT.blocks) * panel_block, load_i64(op + PRODUCT.out_stride)
        panel = load_i64(op + PRODUCT.panels) + thread * load_i64(op + PRODUCT.panels_stride)
        group = claim(op) * groups
        while group < n_groups:
            next_group = claim(op) * groups
            n_here = min(groups, n_groups - group)
            for index in range(n_here):
                unpack_group(op, group + index, panel + index * panel_bytes)
            for number in range(n_tiles):
                prefetch_weights(op, next_group, min(groups, n_groups - next_group), number, n_tiles)
                multiply_tile(op, panel, panel_bytes, number * tile_rows, group, n_here, y)
            first = n_tiles * tile_rows
            for index in range(n_here):
                to = y + first * y_stride + 64 * (group + index)
                # The next weights are already on their way. `multiply_rows` always prefetches something, so it is given
                # the panel, which is in the cache.
                multiply_rows(op, group + index, first, rows - first, to, panel, 0, 0)
            group = next_group

    @inline_function
    def multiply_few(op: Any, step: Any, rows: Any, first: Any, y: Any) -> Any:
        n_groups, n_blocks = load_i64(op + PRODUCT.groups), load_i64(op + PRODUCT.blocks)
        chunk = load_i64(op + PRODUCT.chunk)
        way = prefetch_way(step, rows)
        start = claim(op) * chunk
        while start < n_groups:
            # The next chunk is claimed early, so that its weights can be prefetched during this chunk.
            next_start = claim(op) * chunk
            ahead, advance, stride = ahead_of(op, way, start, next_start)
            for group in range(start, min(start + chunk, n_groups)):
                if rows == 1:
                    multiply_row(op, group, first, y + 64 * group, ahead, advance, stride)
                else:
                    multiply_rows(op, group, first, rows, y + 64 * group, ahead, advance, stride)
                ahead += n_blocks * advance
            start = next_start

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        y = load_i64(op + PRODUCT.out)
        if load_i64(op + PRODUCT.logits) != 0:
            y = load_i64(step + records.STEP_LOGITS)
        if rows < threshold:
            multiply_few(op, step, rows, private_row(op, step, thread, PRIVATE_INPUT), y)
        else:
            multiply_many(op, rows, thread, y)

    return run
