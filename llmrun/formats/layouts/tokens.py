"""Constants and records that the kernels for tokenizing and sampling share with their callers.

Importing this file does not load the compiler. The constants for sampling are also shared with the kernel's twin.

The sampling kernel processes a list of row records. Each has ROW_WORDS words: the logits of one row, the parameters of
its draw, and its results. Words are int64, or float64 where the comment says so.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from llmrun.formats.layouts.arena import round_up
from llmrun.formats.layouts.records import CACHE_LINE, WORD

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


class SamplingWords(NamedTuple):
    """The arguments of `sample` in its op record."""

    rows: int  # the address of the first row record
    n_rows: int
    vocabulary: int
    scratch: int  # scratch_bytes(vocabulary) for each thread, aligned to a cache line
    scratch_bytes: int
    room: int  # scratch_room(vocabulary)


# --- row record ------------------------------------------------------------------------------------------------------
# The module and the function of the kernel that draws tokens. The engine uses it with every backend.
SAMPLING_KERNEL: Final = ("sampling.chain", "sample")

ROW_LOGITS: Final = 0 * WORD  # address of float32[vocabulary], which is only read
ROW_TOP_LOGPROBS: Final = 1 * WORD  # the number of likeliest ids to report, or DRAW for a row that draws a token
ROW_TOP_IDS: Final = 2 * WORD  # address of an output, int64[top logprobs]
ROW_HISTORY: Final = 3 * WORD  # address of int32[n], the tokens to penalize
ROW_HISTORY_LENGTH: Final = 4 * WORD
ROW_BIAS_IDS: Final = 5 * WORD  # addresses of int32[n] and float32[n]
ROW_BIASES: Final = 6 * WORD
ROW_N_BIASES: Final = 7 * WORD
ROW_MASK: Final = 8 * WORD  # address of the allowed tokens, one bit each (`mask_words`), or 0 if all are allowed
ROW_INDEX: Final = 9 * WORD  # the index of the row in its sequence
ROW_DRAFT: Final = 10 * WORD  # the token that the next row of the sequence assumes, or NO_TOKEN
ROW_TOP_K: Final = 11 * WORD
ROW_TEMPERATURE: Final = 12 * WORD  # float64, like the words up to ROW_PRESENCE_PENALTY
ROW_TOP_P: Final = 13 * WORD
ROW_MIN_P: Final = 14 * WORD
ROW_REPEAT_PENALTY: Final = 15 * WORD
ROW_FREQUENCY_PENALTY: Final = 16 * WORD
ROW_PRESENCE_PENALTY: Final = 17 * WORD
ROW_UNIFORM: Final = 18 * WORD  # the random number of the draw
ROW_LIMIT: Final = 19 * WORD  # in a sequence's first row: the index of its last valid row; rows after it are skipped
ROW_STATUS: Final = 20 * WORD  # output: one of the constants below
ROW_TOKEN: Final = 21 * WORD  # output: the token drawn
ROW_LARGEST: Final = 22 * WORD  # output, float64: the largest of the unmodified logits, or NaN if any logit is NaN
ROW_TOTAL: Final = 23 * WORD  # output of logprobs, float64: the sum of exp(logit - largest)
ROW_WORDS: Final = 24
ROW_BYTES: Final = ROW_WORDS * WORD
ROW_INPUTS: Final = Struct("=12q7d2q")  # the words up to ROW_STATUS
ROW_OUTPUTS: Final = Struct("=2q2d")  # the words from ROW_STATUS

DRAW: Final = -1
NO_TOKEN: Final = -1

NO_LIMIT: Final = 1 << 62  # the first value of ROW_LIMIT

# Values of ROW_STATUS.
SKIPPED: Final = 0  # an earlier row of the sequence did not draw the token that this row assumes
DONE: Final = 1
BAD_OUTPUT: Final = 2  # the largest logit is not finite
ALL_BANNED: Final = 3  # together, the mask and the logit bias ban every token
NO_SUCH_TOKEN: Final = 4  # the history or the logit bias contains an id that is not in the vocabulary

# --- scratch memory of a thread: arrays of `room` elements, in this order -------------------------------------------
STRIPES: Final = 1024  # 256 to 4,096 are equally fast for vocabularies of 49k and 152k tokens
DIGIT_BITS: Final = 11
N_DIGITS: Final = 3  # digits of a 32-bit sort key
SCRATCH_LOGITS: Final = 0  # bytes per element before each array: float32 logits
SCRATCH_IDS: Final = 4  # int32
SCRATCH_WEIGHTS: Final = 8  # float64
SCRATCH_WORDS: Final = 16  # int64, to sort
SCRATCH_SPARE_WORDS: Final = 24  # int64, the output of a pass of the sort
SCRATCH_COUNTS: Final = 32  # int32[N_DIGITS << DIGIT_BITS]


def mask_words(vocabulary: int) -> int:
    """Return the number of 32-bit words of a mask. Bit i % 32 of word i // 32 is set if token i is allowed."""
    return round_up(vocabulary, 32) // 32


def scratch_room(vocabulary: int) -> int:
    """Return the number of elements of each scratch array: whole vectors, and at least one for each stripe."""
    return round_up(max(vocabulary, STRIPES), 16)


def scratch_bytes(vocabulary: int) -> int:
    """Return the bytes of scratch memory that a thread needs."""
    return round_up(SCRATCH_COUNTS * scratch_room(vocabulary) + 4 * (N_DIGITS << DIGIT_BITS), CACHE_LINE)


# --- exp -------------------------------------------------------------------------------------------------------------
LOWEST_EXPONENT: Final = -700.0  # below this, e^x is rounded to 0; above it, 2^n is a normal number
INVERSE_LN2: Final = 1 / 0.6931471805599453
LN2_HIGH: Final = 0.693147180369123816490  # the upper 33 bits of ln 2, so that n * LN2_HIGH is exact
LN2_LOW: Final = 1.90821492927058770002e-10
EXP_TERMS: Final = (
    *(1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040),
    *(1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0),
)  # 1/13! ... 1/0!; the remainder is below 1e-17
SMALLEST_TEMPERATURE: Final = 1e-9  # so that dividing a float32 by the temperature cannot overflow
