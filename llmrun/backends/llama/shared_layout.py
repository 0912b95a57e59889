"""The layout of the memory that llmrun shares with the process that runs llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from llmrun.backends.llama.shared_memory import PAGE, rounded_to_pages

# The first page contains the abort flag: two bytes that `strlen` reads. This page stays mapped while the process runs.
FLAG_BYTES = PAGE

# Maximum number of rows whose logits or hidden states a llama_decode call returns. llama.cpp reserves space for the
# logits of all of them in its compute buffer. With its default of 512, that is half a gigabyte for a vocabulary of
# 262,144 tokens. The engine only needs the logits of one row per sequence.
MOST_WANTED = 64

CONTEXT_STEP = 256  # tokens; llama.cpp rounds its context size up to a multiple of this


@dataclass(frozen=True, slots=True)
class Layout:
    """The byte offsets of the shared arrays: a forward pass's inputs and results, and the length of each sequence.

    rows             maximum number of rows in a pass
    vocabulary_size  logits per row
    max_sequences    number of sequence lengths
    hidden_size      features of a hidden state
    encodes          whether passes return the hidden states of all rows, and never logits
    """

    rows: int
    vocabulary_size: int
    max_sequences: int
    hidden_size: int
    encodes: bool = False

    @property
    def most_wanted(self) -> int:
        """The maximum number of rows whose results a pass returns."""
        return self.rows if self.encodes else MOST_WANTED

    @property
    def logits_shape(self) -> tuple[int, int]:
        return self.most_wanted, 0 if self.encodes else self.vocabulary_size

    @property
    def tokens(self) -> int:
        return FLAG_BYTES

    @property
    def sequences(self) -> int:
        return self.tokens + 4 * self.rows

    @property
    def positions(self) -> int:
        return self.sequences + 4 * self.rows

    @property
    def lengths(self) -> int:
        return self.positions + 4 * self.rows

    @property
    def wanted(self) -> int:
        return self.lengths + 4 * self.max_sequences

    @property
    def logits(self) -> int:
        return rounded_to_pages(self.wanted + self.rows)

    @property
    def hidden(self) -> int:
        return rounded_to_pages(self.logits + 4 * prod(self.logits_shape))

    @property
    def n_bytes(self) -> int:
        return rounded_to_pages(self.hidden + 4 * self.most_wanted * self.hidden_size)
