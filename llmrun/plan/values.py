"""The values that pass between the ops of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rows(StrEnum):
    """Which rows a value has."""

    ALL = "all"  # those of the step
    WANTED = "wanted"  # those whose logits are asked for
    CHOSEN = "chosen"  # one for each expert that a row of the step is sent to


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """float32[rows, width]. `copies` is the number of experts each row is sent to, where rows are CHOSEN."""

    width: int
    rows: Rows = Rows.ALL
    copies: int = 1

    def like(self, width: int) -> Value:
        """Another value with the same rows."""
        return Value(width, self.rows, self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts each row is sent to, `used` of `experts`, by falling probability, and their weights."""

    experts: int
    used: int
