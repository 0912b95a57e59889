"""Divides the rows of a batch into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def steps_of(sequences: Sequence[int], most: int, *, whole: bool) -> Iterator[slice]:
    """Yield the rows of each step, which are at most `most`, in order.

    sequences  the sequence of each row
    whole      never divide the rows of a sequence, which must not be more than `most`
    """
    start, n = 0, len(sequences)
    while start < n:
        end = min(start + most, n)
        while whole and end < n and sequences[end] == sequences[end - 1]:
            end -= 1
        yield slice(start, end)
        start = end


def check_whole(sequences: Sequence[int], positions: Sequence[int]) -> None:
    """Check that the rows of each sequence follow one another and begin at position 0. Raises ValueError.

    Without a causal mask, earlier rows depend on later ones, so a sequence cannot be continued.
    """
    beginnings = [row for row, seq in enumerate(sequences) if row == 0 or sequences[row - 1] != seq]
    if len(beginnings) > len(set(sequences)) or any(positions[row] for row in beginnings):
        raise ValueError("a model without a causal mask needs all rows of a sequence together")
