"""Constants shared by the merge kernels and their callers. Importing this file does not load the compiler."""

from __future__ import annotations

# Stands for a token id that does not exist.
NOT_FOUND = -1

# Bytes of scratch memory per byte of the longest piece, for links, ranks or lengths, and two int64 keys on the heap.
SCRATCH_BYTES_PER_BYTE = 40

# The priority of tokens that plain text never produces. It sorts after all other priorities.
NEVER = 0x7FFFFFFF

# Flags of special tokens.
CONTROL, ONE_CHARACTER = 1, 2

# The number of words of a text that the SentencePiece kernel caches, and the bytes for each word (an int64[4]).
KNOWN_WORDS = 4096
KNOWN_WORD_BYTES = 32
