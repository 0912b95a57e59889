"""Record fields and sizes shared by the kernels that measure this machine's limits and by their caller."""

from __future__ import annotations

from typing import NamedTuple

MOST_SUMS = 12


class ReadWords(NamedTuple):
    """The arguments of `read` in its op record."""

    address: int
    chunks: int
    chunk_bytes: int
    results: int


class MultiplyWords(NamedTuple):
    """The arguments of `multiply` in its op record."""

    rounds: int
    vectors: int
    results: int


def independent_sums(level: str) -> int:
    """Return how many independent sums `multiply` computes to hide the latency of the multiply instruction.

    Their number is limited by the number of registers.
    """
    return MOST_SUMS if level == "avx512vnni" else 4


def products_a_round(level: str) -> int:
    """Return how many int8 multiply-adds `multiply` performs per round."""
    return 64 * independent_sums(level)
