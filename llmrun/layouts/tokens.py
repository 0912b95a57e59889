"""Constants shared by the merge kernels and their callers. Importing this file does not load the compiler."""

from __future__ import annotations

# The value that stands for a missing token id.
NOT_FOUND = -1

# Scratch memory per byte of the longest piece: links, ranks or lengths, and two int64 keys on the heap.
SCRATCH_BYTES_PER_BYTE = 40

# The priority of tokens that plain text never produces. It comes after all others.
NEVER = 0x7FFFFFFF

# Flags of special tokens.
CONTROL, ONE_CHARACTER = 1, 2

# How many words of a text the SentencePiece kernel remembers, and the bytes for each (an int64[4]).
KNOWN_WORDS = 4096
KNOWN_WORD_BYTES = 32
