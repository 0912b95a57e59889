"""Saves the blocks of a paged KV cache as parts, and loads them again.

A part has one block of every pool. Pools of layers with a sliding window no longer hold the old blocks of a sequence,
so these are missing from its parts. Bit i of a part's `contents` says whether it has a block of pool i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.kv_pool import BlockPool, blocks_in
from llmrun.backends.saved_parts import BLOCK_PART, SavedPart
from llmrun.base.errors import IntegrityError
from llmrun.formats.layouts.kv_blocks import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray


def saved_blocks(pools: Sequence[BlockPool], seq: int, n: int) -> list[SavedPart]:
    """Return the first n positions of a sequence as parts. Their data is read only when it is needed."""
    parts = []
    for index in range(blocks_in(n)):
        held = [number for number, pool in enumerate(pools) if pool.holds(seq, index)]
        n_bytes = sum(pools[number].block_bytes for number in held)
        read = partial(_read, [pools[number] for number in held], seq, index)
        contents = sum(1 << number for number in held)
        parts.append(SavedPart(BLOCK_PART, index * BLOCK, min(n, (index + 1) * BLOCK), contents, n_bytes, read))
    return parts


def _read(pools: Sequence[BlockPool], seq: int, index: int) -> memoryview:
    return np.concatenate([pool.read_block(seq, index) for pool in pools]).data


def consecutive_blocks(parts: Iterable[SavedPart], context_size: int) -> list[SavedPart]:
    """Return the parts from the first one to the last that continues the one before it and fits in the context."""
    found: list[SavedPart] = []
    for part in parts:
        if part.kind != BLOCK_PART:
            continue
        end = found[-1].end if found else 0
        fits = part.start == end and end % BLOCK == 0 and 0 < part.end - end <= BLOCK and part.end <= context_size
        if not fits:
            break
        found.append(part)
    return found


def load_block(pools: Sequence[BlockPool], seq: int, part: SavedPart, n: int) -> None:
    """Append a block to a sequence of `part.start` positions, which will have n positions in the end.

    Raises IntegrityError if the part is damaged, or if its size or contents are impossible. The pools are then
    unchanged.
    """
    index = part.start // BLOCK
    inside = [part.contents >> number & 1 for number in range(len(pools))]
    n_bytes = sum(pool.block_bytes for pool, is_inside in zip(pools, inside, strict=True) if is_inside)
    if part.contents >> len(pools) or part.n_bytes != n_bytes:
        raise IntegrityError(f"a saved block has {part.n_bytes:,} bytes, expected {n_bytes:,}")
    if not all(is_inside or pool.window for pool, is_inside in zip(pools, inside, strict=True)):
        raise IntegrityError("a saved block lacks the keys and values of some layers")
    data = np.frombuffer(part.read(), np.uint8)
    for pool, is_inside in zip(pools, inside, strict=True):
        block: NDArray[np.uint8] | None = None
        if is_inside:
            block, data = data[: pool.block_bytes], data[pool.block_bytes :]
        pool.load_block(seq, index, block, blocks_in(n))
