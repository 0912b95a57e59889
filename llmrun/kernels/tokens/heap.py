"""A binary min-heap of int64 keys in memory that the caller provides. The caller keeps track of the size."""

from __future__ import annotations

from llmrun.kernels.code.load_store import load_i64, store_i64
from llmrun.kernels.compiler import inline_function


@inline_function
def heap_push(heap: int, size: int, key: int) -> None:
    """Add a key to a heap of `size` keys."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        above = load_i64(heap + parent * 8)
        if above <= key:
            break
        store_i64(heap + child * 8, above)
        child = parent
    store_i64(heap + child * 8, key)


@inline_function
def heap_pop(heap: int, size: int) -> int:
    """Remove and return the smallest key of a heap of `size` > 0 keys."""
    least: int = load_i64(heap)
    last = size - 1
    key = load_i64(heap + last * 8)
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= last:
            break
        below = load_i64(heap + child * 8)
        if child + 1 < last:
            right = load_i64(heap + (child + 1) * 8)
            if right < below:
                child += 1
                below = right
        if below >= key:
            break
        store_i64(heap + parent * 8, below)
        parent = child
    store_i64(heap + parent * 8, key)
    return least
