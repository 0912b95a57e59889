"""The rows of a step whose logits or hidden states are requested, in the order in which the kernels compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.plan.values import Rows
from llmrun.types import HIDDEN, LOGITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.plan.values import Value


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The wanted rows of a step.

    rows    int32[], the rows whose logits are wanted, followed by those of which only the hidden state is wanted
    scored  number of rows whose logits are wanted
    hidden  int64[], the index of each wanted hidden state in the plan's value
    """

    rows: NDArray[np.int32]
    scored: int
    hidden: NDArray[np.int64]

    @classmethod
    def of(cls, want: NDArray[np.uint8], hidden: Value | None) -> WantedRows:
        """Return the wanted rows.

        want    uint8[rows], see Batch
        hidden  the plan's hidden state. Unless it has only the wanted rows, no more rows than those with logits need to
                be gathered
        """
        scored = np.flatnonzero(want & LOGITS)
        of_hidden = np.flatnonzero(want & HIDDEN)
        if not len(of_hidden) or hidden is None or hidden.rows is not Rows.WANTED:
            return cls(scored.astype(np.int32), len(scored), of_hidden)
        rows = np.concatenate([scored, np.flatnonzero(want == HIDDEN)])
        places = np.empty(len(want), np.int64)
        places[rows] = np.arange(len(rows))
        return cls(rows.astype(np.int32), len(scored), places[of_hidden])
