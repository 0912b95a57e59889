"""Rotary position embeddings (RoPE): the angle by which each pair of features is rotated at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.model.plan.elementary import cosines_and_sines, log, turns

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Pairing(StrEnum):
    """The ways to pair the features of a head."""

    INTERLEAVED = "interleaved"  # features 2i and 2i + 1, called "norm" in llama.cpp
    NEOX = "neox"  # features i and i + pairs


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The rotary embedding of the first `2 * len(frequencies)` features of a head.

    frequencies  float64[pairs], radians per position
    magnitude    factor applied to the rotated features (the attention factor of YaRN and LongRoPE)
    longer       (context size, Rope): a Rope that replaces this one if the context is larger than the given size
    growth       (factor, tokens): for long contexts, queries are also multiplied by
                 1 + factor * log(1 + position // tokens)
    turns        the frequencies in 2^-64 turns per position, uint64[pairs]
    """

    frequencies: NDArray[np.float64]
    pairing: Pairing = Pairing.INTERLEAVED
    magnitude: float = 1.0
    longer: tuple[int, Rope] | None = None
    growth: tuple[float, int] | None = None
    turns: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        assert self.longer is None or self.longer[1].frequencies.size == self.frequencies.size
        object.__setattr__(self, "turns", turns(self.frequencies))

    @property
    def pairs(self) -> int:
        return self.frequencies.size

    def in_context(self, size: int) -> Self:
        """Return the Rope to use at every position of a context of `size` tokens."""
        if self.longer is not None and size > self.longer[0]:
            other = self.longer[1]
            return replace(self, frequencies=other.frequencies, magnitude=other.magnitude, longer=None)
        return self

    def rotations(self, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the cosines and sines of each row's angles, times `magnitude`, as float32[rows, pairs, 2].

        They are computed in float64, with the same bits on every machine.
        """
        both = cosines_and_sines(positions[:, None].astype(np.uint64) * self.turns)
        size: float | NDArray[np.float64] = self.magnitude
        if self.growth is not None:
            factor, tokens = self.growth
            size = (
                size * np.array([1 + factor * log(1 + position // tokens) for position in positions.tolist()])[:, None]
            )
        return np.stack([*(both * size).astype(np.float32)], axis=-1)


def rotations_of(ropes: Sequence[Rope], positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """Concatenate the rotations of several ropes into a contiguous float32[rows, pairs of all ropes, 2]."""
    if len(ropes) == 1:
        return ropes[0].rotations(positions)
    if not ropes:
        return np.zeros((len(positions), 0, 2), np.float32)
    return np.concatenate([rope.rotations(positions) for rope in ropes], axis=1)
