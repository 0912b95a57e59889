"""What is checked of a batch before a backend believes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.types import Batch, ModelInfo


def check_batch(batch: Batch, info: ModelInfo, lengths: Sequence[int]) -> None:
    """Native code indexes memory by what a batch says, so a mistake of the caller must not reach it.

    `lengths` are the tokens each sequence holds now. Raises ValueError.
    """
    # Lists: for the one row of a decode step NumPy's reductions take eight times as long.
    tokens, sequences, positions = batch.tokens.tolist(), batch.seq.tolist(), batch.pos.tolist()
    if not tokens:
        raise ValueError("a batch has at least one row")
    if min(tokens) < 0 or max(tokens) >= info.vocabulary_size:
        raise ValueError(f"token ids must be 0 to {info.vocabulary_size - 1}")
    if min(sequences) < 0 or max(sequences) >= info.max_sequences:
        raise ValueError(f"sequences must be 0 to {info.max_sequences - 1}")
    following = list(lengths)
    for seq, position in zip(sequences, positions, strict=True):
        if position != following[seq]:
            raise ValueError(f"sequence {seq} goes on at position {following[seq]}, not {position}")
        following[seq] += 1
    if max(following) > info.context_size:
        raise ValueError(f"a sequence of {max(following)} tokens in a context of {info.context_size}")
