"""A paged cache in which each position holds one number. It simulates what kernels write and read, without kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.cpu.paged_kv import BlockPool, PagedKV
from llmrun.formats.layouts.kv import BLOCK

GROUPS, LAYERS = 2, 2  # per window


class PagedCache:
    """PagedKV with a given number of blocks per window. Each layer of each group stores tokens a little differently."""

    def __init__(self, n_blocks: Mapping[int, int], max_sequences: int, context: int) -> None:
        self.memory = {
            window: [np.zeros((LAYERS, count, BLOCK * 2), np.uint8) for _ in range(GROUPS)]
            for window, count in n_blocks.items()
        }
        self.kv = PagedKV(self.memory, max_sequences, context)

    def step(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Extend the cache and write each row, as the engine does in a step."""
        starts = {seq: self.kv.lengths[seq] for seq in tokens}
        self.kv.extend({seq: len(new) for seq, new in tokens.items()})
        for seq, new in tokens.items():
            positions = np.arange(starts[seq], starts[seq] + len(new))
            for window in self.memory:
                for number, layer in enumerate(self._layers(window)):
                    layer[self._places(window, seq, positions)] = np.asarray(new) ^ number

    def read(self, window: int, seq: int, positions: range) -> list[int]:
        """Return the tokens that all layers of a window hold at these positions."""
        places = self._places(window, seq, np.arange(positions.start, positions.stop))
        found = [layer[places] ^ number for number, layer in enumerate(self._layers(window))]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
        return [int(token) for token in found[0]]

    def pool(self, window: int) -> BlockPool:
        return self.kv._pools[list(self.memory).index(window)]

    def held_blocks(self, window: int, seq: int) -> list[int]:
        """Return the blocks of a sequence in order of position."""
        first = self.pool(window)._first(seq)
        return [int(block) for block in self._table(window, seq)[first : blocks_of(self.kv.lengths[seq])]]

    def _table(self, window: int, seq: int) -> NDArray[np.int32]:
        table: NDArray[np.int32] = self.kv.tables[list(self.memory).index(window), seq]
        return table

    def _layers(self, window: int) -> list[NDArray[np.uint16]]:
        return [layer.view(np.uint16) for group in self.memory[window] for layer in group]

    def _places(
        self, window: int, seq: int, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        return self._table(window, seq)[positions // BLOCK], positions % BLOCK


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)
