"""Counts how often draft tokens of each kind are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from llmrun.engine.drafting.base import ANY, Draft, Kind

_KEPT: Final = 0.98  # weight of older counts of a kind after each new one
_ASSUMED_COUNT: Final = 4.0  # weight of the assumed rates, in draft tokens


class Rates(Protocol):
    """The expected acceptance of each kind of draft token."""

    def rate(self, kind: Kind) -> float:
        """Return the probability that a token of this kind is right if all draft tokens before it are right."""


class AssumedRates:
    """Constant rates, which draft sources provide."""

    def __init__(self, expected: Mapping[Kind, float]) -> None:
        self._expected = expected

    def rate(self, kind: Kind) -> float:
        return self._expected[kind]


class Acceptance:
    """The share of right draft tokens of each kind, with other rates as a prior that weighs _ASSUMED_COUNT tokens.

    An engine counts the tokens of all answers. Each answer also has its own counts, with the engine's rates as their
    prior. If a request to tell a story follows one to copy a text, the rates therefore fall after a few wrong tokens.
    """

    def __init__(self, assumed: Rates) -> None:
        self._assumed = assumed
        self._right: dict[Kind, float] = {}
        self._tried: dict[Kind, float] = {}

    def observe(self, draft: Draft, n_right: int, *, found_wrong: bool) -> None:
        """Record that the first `n_right` tokens of a draft were right, and whether the next one was wrong."""
        for index, kind in enumerate(draft.kinds[: n_right + found_wrong]):
            for counted in (kind, (kind[0], ANY)):
                self._right[counted] = self._right.get(counted, 0.0) * _KEPT + (index < n_right)
                self._tried[counted] = self._tried.get(counted, 0.0) * _KEPT + 1

    def rate(self, kind: Kind) -> float:
        right = self._right.get(kind, 0.0) + _ASSUMED_COUNT * self._assumed.rate(kind)
        return right / (self._tried.get(kind, 0.0) + _ASSUMED_COUNT)
