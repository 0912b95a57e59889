"""Numbers that the merge kernels and those who call them must agree on. Imports nothing, so that a caller need not
load the compiler."""

from __future__ import annotations

# In place of an id: there is no such token.
NOT_FOUND = -1

# What one byte of the longest piece needs of `scratch`: links, ranks or lengths, and a heap of two int64 keys.
SCRATCH_BYTES_PER_BYTE = 40

# The priority of a token that plain text never becomes; behind all others.
NEVER = 0x7FFFFFFF

# Flags of a special token.
CONTROL, ONE_CHARACTER = 1, 2

# Words of one text that the SentencePiece kernel remembers, at most, and int64[4] for each.
KNOWN_WORDS = 4096
KNOWN_WORD_BYTES = 32
