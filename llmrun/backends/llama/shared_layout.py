"""Where things lie in the memory that llmrun shares with the process that runs llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.backends.llama.shared_memory import PAGE, rounded_to_pages

# The first page, mapped for as long as the process lives: the abort flag, two bytes that `strlen` reads.
FLAG_BYTES = PAGE

# Rows whose logits one llama_decode returns. llama.cpp reserves logits for as many in its compute buffer: with 512, as
# it would, that is half a gigabyte for a vocabulary of 262,144 tokens. The engine wants one row a sequence.
MOST_WANTED = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets of the arrays of one forward pass of at most `rows` rows, and of the tokens each sequence holds."""

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
