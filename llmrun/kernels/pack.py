"""Weights from the file's layout into the kernels' layout: groups of 16 outputs, so that a vector is 16 outputs wide.

Integer types, per group: a plane of scales float16[blocks, 16], for Q4_1 a plane of mins alike, and a plane of integers
uint8[blocks, 4 or 8, 16, 4]: vector j of a block holds 4 columns of 16 rows, the 4-bit types two columns a byte as the
file does (column c low, c + 16 high). Each plane starts on a cache line; the bytes are the file's, only moved.
Float types, per group: [columns, 16] of the file's own type. Missing rows of the last group and the padding are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmrun.kernels import records
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.memory import load_i64, load_u16, load_u32, store_i16, store_i32
from llmrun.kernels.work import claim

if TYPE_CHECKING:
    pass

ARG = records.OP_ARGS
A_SOURCE, A_PACKED, A_ROWS, A_COLUMNS, A_ROW_BYTES, A_GROUP_BYTES, A_MINS, A_QUANTS = (ARG + 8 * i for i in range(8))


@kernel_family
def pack_integers(level: str, weight: str) -> Callable[..., None]:
    """`weight`: "q4_0", "q4_1" or "q8_0". An item is a group; the destination is zeroed memory."""
    header = 4 if weight == "q4_1" else 2
    words = 8 if weight == "q8_0" else 4
    block_bytes = header + 4 * words
    has_mins = weight == "q4_1"

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        source = load_i64(op + A_SOURCE)
        rows = load_i64(op + A_ROWS)
        row_bytes = load_i64(op + A_ROW_BYTES)
        n_blocks = load_i64(op + A_COLUMNS) // 32
        group_bytes = load_i64(op + A_GROUP_BYTES)
        n_groups = (rows + 15) // 16
        group = claim(op)
        while group < n_groups:
            base = load_i64(op + A_PACKED) + group * group_bytes
            mins = base + load_i64(op + A_MINS)
            quants = base + load_i64(op + A_QUANTS)
            for lane in range(min(16, rows - 16 * group)):
                row = source + (16 * group + lane) * row_bytes
                for block in range(n_blocks):
                    at = row + block * block_bytes
                    store_i16(base + 32 * block + 2 * lane, load_u16(at))
                    if has_mins:
                        store_i16(mins + 32 * block + 2 * lane, load_u16(at + 2))
                    to = quants + 64 * words * block + 4 * lane
                    for word in range(words):
                        store_i32(to + 64 * word, load_u32(at + header + 4 * word))
            group = claim(op)

    return run


@kernel_family
def pack_floats(level: str, element_bytes: int) -> Callable[..., None]:
    """`element_bytes`: 2 (F16, BF16) or 4 (F32). An item is a group."""
    wide = element_bytes == 4

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        source = load_i64(op + A_SOURCE)
        rows = load_i64(op + A_ROWS)
        columns = load_i64(op + A_COLUMNS)
        row_bytes = load_i64(op + A_ROW_BYTES)
        group_bytes = load_i64(op + A_GROUP_BYTES)
        n_groups = (rows + 15) // 16
        group = claim(op)
        while group < n_groups:
            base = load_i64(op + A_PACKED) + group * group_bytes
            for lane in range(min(16, rows - 16 * group)):
                row = source + (16 * group + lane) * row_bytes
                for column in range(columns):
                    to = base + (16 * column + lane) * element_bytes
                    if wide:
                        store_i32(to, load_u32(row + 4 * column))
                    else:
                        store_i16(to, load_u16(row + 2 * column))
            group = claim(op)

    return run
