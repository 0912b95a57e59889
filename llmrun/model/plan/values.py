"""The values that ops pass to each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rows(StrEnum):
    """The rows that a value contains."""

    ALL = "all"  # every row of the step
    WANTED = "wanted"  # only the rows whose logits or hidden states are requested, those with logits first
    SCORED = "scored"  # only the rows whose logits are requested
    CHOSEN = "chosen"  # one copy of each row per expert that the row is routed to


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A float32[rows, width] array.

    If the rows are CHOSEN, `copies` is the number of experts that each row is routed to.
    """

    width: int
    rows: Rows = Rows.ALL
    copies: int = 1

    def like(self, width: int) -> Value:
        """Create another value of the given width with the same rows."""
        return Value(width, self.rows, self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts that each row is routed to, most probable first, and their weights.

    Each row is routed to `used` of the `experts` experts.
    """

    experts: int
    used: int
