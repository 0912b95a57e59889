"""Constants shared by the merge kernels and their callers. Importing this file does not load the compiler."""

from __future__ import annotations

# Stands for a token id that does not exist.
NOT_FOUND = -1

# Bytes of scratch memory per byte of the longest piece, for links, ranks or lengths, and two int64 keys on the heap.
SCRATCH_BYTES_PER_BYTE = 40

# The priority of tokens that plain text never produces. It sorts after all other priorities.
NEVER = 0x7FFFFFFF

# The score of tokens that plain text never becomes. No sum of real scores is as low.
IMPOSSIBLE = -1e300

# Unigram tokenizers know the length of the longest token for each hash of so many first bytes, which are those of the
# mark of a word's beginning and three letters.
PREFIX_BYTES, PREFIX_SLOTS = 6, 1 << 16

# Flags of special tokens.
CONTROL, ONE_CHARACTER = 1, 2

# The number of words of a text that the SentencePiece kernel caches, and the bytes for each word (an int64[4]).
KNOWN_WORDS = 4096
KNOWN_WORD_BYTES = 32
