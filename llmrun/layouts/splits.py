"""Constants shared by the split kernel and the code that builds its tables. Importing this file loads no compiler."""

from __future__ import annotations

# Bit of a symbol: a piece begins at this character. Symbols are smaller than this.
BEGINS = 0x80

# Bits of an entry in a transition table.
ENDS_HERE = 1
NO_WAY_ON = 2
ROW_SHIFT = 2

# The kinds of stages.
MATCHES, GROUPS_OF_THREE, WHOLE_GROUPS_OF_THREE, TRAILING_RUN = range(4)

# int64 words per stage: its kind and the address of its table.
STAGE_WORDS = 2
