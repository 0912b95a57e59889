"""The layout of recurrent states, and how a step describes them to the kernels.

The state that is stored for a sequence is the one after its first `base` rows. The rows from the base to the end of the
sequence can still be removed. Their inputs are in a replay buffer, and the next step applies those that have not been
removed to the state before it runs its own rows. In this way, rejecting a draft costs nothing.

A run is the rows of one sequence in a step, described by int64[8] (`RUN_*`). Each run commits the state at one
position, which becomes the new base: anywhere from the old base to the position after the last row.

A sequence has two replay buffers. A step reads rows from one of them and writes its rows after the new base to the
other, so that no thread overwrites rows that another one still needs.
"""

from __future__ import annotations

from typing import Final

REPLAY_ROWS: Final = 16  # the most rows that can be removed without a checkpoint: a draft, or the end of a prompt

RUN_WORDS: Final = 8
_WORD: Final = 8
RUN_BYTES: Final = RUN_WORDS * _WORD
RUN_FIRST: Final = 0 * _WORD  # index of the run's first row in the list of rows (STEP_RUN_ROWS)
RUN_ROWS: Final = 1 * _WORD  # number of rows
RUN_SEQUENCE: Final = 2 * _WORD  # index of the sequence's state
RUN_BASE: Final = 3 * _WORD  # the base before the step
RUN_START: Final = 4 * _WORD  # position of the first row
RUN_COMMIT: Final = 5 * _WORD  # the base after the step
RUN_BUFFER: Final = 6 * _WORD  # index of the replay buffer to read; the other one is written
