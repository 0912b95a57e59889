"""Counts the prompt tokens that a run computes, because they are not in the cache as a prefix of an earlier prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import ne


class PrefixCounter:
    """Counts the computed tokens of prompts that are given in the order in which a run computes them.

    A prompt reuses what it has in common with the one before it. In sorted order, this is as much as it has in common
    with any earlier prompt, so only one prompt has to be kept, however many there are.

    total   tokens of all prompts
    computed  how many of them are computed
    common  how many tokens are the same at the beginning of all prompts
    """

    def __init__(self) -> None:
        self.total = self.computed = self.common = 0
        self._last: Sequence[int] | None = None

    def add(self, tokens: Sequence[int]) -> None:
        """Count the next prompt. At least its last token is computed, because the answer begins with its logits."""
        if self._last is None:
            shared, self.common = 0, len(tokens)
        else:
            shared = common_prefix(self._last, tokens)
            self.common = min(self.common, shared)
        self.total += len(tokens)
        self.computed += len(tokens) - min(shared, max(len(tokens) - 1, 0))
        self._last = tokens


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens are the same at the beginning of both sequences."""
    return next(compress(count(), map(ne, one, other)), min(len(one), len(other)))
