"""Record fields and sizes shared by the kernels that measure this machine's limits and by their caller."""

from __future__ import annotations

from typing import NamedTuple

MOST_SUMS = 12


READ_BYTES = 512  # the number of consecutive bytes that `read` reads from one stream at a time


class ReadWords(NamedTuple):
    """The arguments of `read` in its op record.

    streams  number of equal parts of a chunk that are read side by side; each is a multiple of READ_BYTES
    ahead    prefetch distance in bytes, or 0 to prefetch nothing
    """

    address: int
    chunks: int
    chunk_bytes: int
    results: int
    streams: int
    ahead: int


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
    return (128 if level == "neoni8mm" else 64) * independent_sums(level)
