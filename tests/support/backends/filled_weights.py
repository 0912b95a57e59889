"""Packed weights without other work that overlaps with packing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmrun.backends.cpu.weights import PackedMatrix, filling


def fill(
    packed: Mapping[str, PackedMatrix], n_threads: int, progress: Callable[[int, int], None] | None = None
) -> None:
    """Read and pack all matrices. Raises any error from reading."""
    with filling(packed, n_threads) as weights:
        weights.finish(progress)
