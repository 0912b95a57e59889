"""Places the rows of images into the embeddings, and adds their parts in later layers.

Other rows of the step stay as they are. Only the features of a row are written, because the padding after them must
stay zero.
"""

from __future__ import annotations

from typing import Any

from llmrun.formats.layouts import records
from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code.load_store import load_f32, load_i64, store_f32
from llmrun.kernels.code.work import PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row
from llmrun.kernels.compiler import kernel
from llmrun.model.plan.ops.embedding import ImageWords

_IMAGES = offsets(ImageWords)


@kernel
def place_images(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Write scale * the image's row to each row of an image."""
    addresses = load_i64(step + records.STEP_IMAGES)
    rows = n_rows(op, step) if addresses != 0 else 0
    stride, scale = load_i64(op + _IMAGES.out_stride), load_f32(op + _IMAGES.scale)
    out = load_i64(op + _IMAGES.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * stride
    row = first_item(op, step, thread, n_threads, rows)
    while row < rows:
        source = load_i64(addresses + 8 * row)
        if source != 0:
            source += load_i64(op + _IMAGES.first)
            for at in range(0, 4 * load_i64(op + _IMAGES.width), 4):
                store_f32(out + row * stride + at, scale * load_f32(source + at))
        row = next_item(op, step, row, n_threads, rows)


@kernel
def add_images(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Add a part of the image's row to each row of an image."""
    addresses = load_i64(step + records.STEP_IMAGES)
    rows = n_rows(op, step) if addresses != 0 else 0
    stride = load_i64(op + _IMAGES.out_stride)
    out = load_i64(op + _IMAGES.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * stride
    row = first_item(op, step, thread, n_threads, rows)
    while row < rows:
        source = load_i64(addresses + 8 * row)
        if source != 0:
            source += load_i64(op + _IMAGES.first)
            for at in range(0, 4 * load_i64(op + _IMAGES.width), 4):
                to = out + row * stride + at
                store_f32(to, load_f32(to) + load_f32(source + at))
        row = next_item(op, step, row, n_threads, rows)
