"""What the kernels that measure this machine's limits and their caller both know."""

from __future__ import annotations

from typing import NamedTuple

MOST_SUMS = 12


class ReadWords(NamedTuple):
    """The op record of `read`."""

    address: int
    chunks: int
    chunk_bytes: int
    results: int


class MultiplyWords(NamedTuple):
    """The op record of `multiply`."""

    rounds: int
    vectors: int
    results: int


def independent_sums(level: str) -> int:
    """Sums that `multiply` keeps at once: their number hides the latency of a product, as far as registers allow."""
    return MOST_SUMS if level == "avx512vnni" else 4


def products_a_round(level: str) -> int:
    """Products of two bytes that `multiply` makes, and adds, in a round."""
    return 64 * independent_sums(level)
