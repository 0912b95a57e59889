"""The layout of the memory that llmrun shares with the process that runs llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.backends.llama.shared_memory import PAGE, rounded_to_pages

# The first page contains the abort flag: two bytes that `strlen` reads. This page stays mapped while the process runs.
FLAG_BYTES = PAGE

# Maximum number of rows whose logits a llama_decode call returns. llama.cpp reserves space for all of them in its
# compute buffer. With its default of 512, that is half a gigabyte for a vocabulary of 262,144 tokens. The engine only
# needs the logits of one row per sequence.
MOST_WANTED = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """The byte offsets of the shared arrays: a forward pass's inputs and logits, and the length of each sequence.

    rows             maximum number of rows in a pass
    vocabulary_size  logits per row
    max_sequences    number of sequence lengths
    """

    rows: int
    vocabulary_size: int
    max_sequences: int

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
    def n_bytes(self) -> int:
        return rounded_to_pages(self.logits + 4 * MOST_WANTED * self.vocabulary_size)
