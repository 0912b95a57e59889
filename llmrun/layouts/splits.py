"""Numbers that the split kernel and those who make its tables must agree on. Imports nothing, as token_layout."""

from __future__ import annotations

# In a symbol: a piece begins here. Symbols are below it.
BEGINS = 0x80

# In an entry of a transition table.
ENDS_HERE = 1
NO_WAY_ON = 2
ROW_SHIFT = 2

# Kinds of stages.
MATCHES, GROUPS_OF_THREE, WHOLE_GROUPS_OF_THREE, TRAILING_RUN = range(4)

# int64 words of one stage: kind, address of its table.
STAGE_WORDS = 2
