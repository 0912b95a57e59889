"""The runs of a step: which rows belong to which sequence, and where recurrent states begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.layouts import states
from llmrun.layouts.states import REPLAY_ROWS

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepRuns:
    """The runs of a step in the form that kernels read.

    words  int64[runs, RUN_WORDS] (layouts/states.py)
    rows   int32[rows], the indices of the rows in the step, run after run
    """

    words: NDArray[np.int64]
    rows: NDArray[np.int32]


NO_RUNS: Final = StepRuns(np.zeros((0, states.RUN_WORDS), np.int64), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Run:
    """The rows of one sequence in a step.

    rows     indices of the rows in the step
    start    position of the first row
    lead     number of rows before the first one whose logits are wanted, or all rows if there is none
    is_last  whether the logits of any row are wanted, as in the last step of a prompt
    """

    sequence: int
    rows: list[int]
    start: int
    lead: int
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    @property
    def certain(self) -> int:
        """The position after the last row that no draft includes.

        The first row whose logits are wanted, and all rows before it, are tokens of the prompt or of the answer. The
        rows that follow may be a draft, which can be rejected.
        """
        return self.start + self.lead + self.is_last

    def commit(self, *, reads_prompt: bool) -> int:
        """Return the position at which the step commits the state. Rows from there on can still be removed.

        These are the rows of a draft or the last rows of a prompt, because the next turn of a chat often differs in
        the last tokens of the prompt, such as an opening thinking tag.
        """
        certain = self.certain - REPLAY_ROWS if reads_prompt else self.certain
        return max(self.start, certain, self.end - REPLAY_ROWS)


def runs_of(sequences: list[int], positions: list[int], wanted: list[bool]) -> list[Run]:
    """Return the runs of a step, given each row's sequence, position, and whether its logits are wanted."""
    rows: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows.setdefault(sequence, []).append(row)
    runs = []
    for sequence, own in rows.items():
        lead = next((index for index, row in enumerate(own) if wanted[row]), len(own))
        runs.append(Run(sequence, own, positions[own[0]], lead, lead < len(own)))
    return runs
