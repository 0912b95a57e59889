"""Validates batches before a backend runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.types import HIDDEN, LOGITS, Batch

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo


def check_batch(batch: Batch, info: ModelInfo, lengths: Sequence[int]) -> None:
    """Check that a batch's tokens, sequences and positions are in range. Raises ValueError.

    Native code uses these numbers as memory indexes, so it must never receive an invalid batch.

    lengths  current number of tokens in each sequence
    """
    # Plain lists are faster here: for a decode step, which has a single row, NumPy reductions take eight times as long.
    tokens, sequences, positions = batch.tokens.tolist(), batch.seq.tolist(), batch.pos.tolist()
    if not tokens:
        raise ValueError("a batch needs at least one row")
    if min(tokens) < 0 or max(tokens) >= info.vocabulary_size:
        raise ValueError(f"token ids must be 0 to {info.vocabulary_size - 1}")
    if min(sequences) < 0 or max(sequences) >= info.max_sequences:
        raise ValueError(f"sequences must be 0 to {info.max_sequences - 1}")
    if batch.scales is not None and (
        batch.scales.shape != (len(tokens), len(info.adapters)) or not np.isfinite(batch.scales).all()
    ):
        raise ValueError(f"scales must be {len(tokens)} x {len(info.adapters)} finite numbers")
    following = list(lengths)
    for seq, position in zip(sequences, positions, strict=True):
        if position != following[seq]:
            raise ValueError(f"sequence {seq} continues at position {following[seq]}, not {position}")
        following[seq] += 1
    if not info.has_logits and (batch.want & LOGITS).any():
        raise ValueError("this model has no logits, only hidden states")
    if not info.hidden_size and (batch.want & HIDDEN).any():
        raise ValueError(f"the {info.backend} backend has no hidden states of this model")
    if max(following) > info.context_size:
        raise ValueError(f"a sequence of {max(following)} tokens does not fit in a context of {info.context_size}")
