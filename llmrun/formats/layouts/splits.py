"""Constants shared by the split kernel and the code that builds its tables. Importing this file loads no compiler."""

from __future__ import annotations

# This bit in a symbol means that a piece begins at its character. Symbols themselves are smaller than this value.
BEGINS = 0x80

# The bits of a transition table entry.
ENDS_HERE = 1
NO_WAY_ON = 2
ROW_SHIFT = 2

# The kinds of stages.
MATCHES, GROUPS_OF_THREE, WHOLE_GROUPS_OF_THREE, TRAILING_RUN = range(4)

# The number of int64 words per stage, which are its kind and the address of its table.
STAGE_WORDS = 2
