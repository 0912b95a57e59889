"""Cuts a text into chunks of tokens as llama.cpp's llama-perplexity does, so that the perplexities are comparable.

Each chunk has `context` tokens and is evaluated on its own. Only the tokens of its second half are scored, because the
model has little context to predict the first ones. The rest of the text, which does not fill a chunk, is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llmrun.model.tokenizers.base import Tokenizer

DEFAULT_CONTEXT: Final = 512  # tokens, as in llama-perplexity
LEAST_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to evaluate, and where scoring begins.

    inputs  int32[n], the tokens that the model reads
    first   the first position whose prediction is scored
    following  int32[n - first], the tokens that follow the scored positions
    """

    inputs: NDArray[np.int32]
    first: int
    following: NDArray[np.int32]

    @property
    def scored(self) -> int:
        """The number of scored predictions."""
        return len(self.following)


def chunks_of(text: str, tokenizer: Tokenizer, context: int, most: int | None = None) -> list[Chunk]:
    """Tokenize a text, cut it into chunks of `context` tokens, and return the first `most` of them.

    If the vocabulary requires a BOS, it replaces the first token of each chunk. Raises UsageError if the text does not
    fill a chunk.
    """
    return [_chunk(tokens, context // 2) for tokens in contexts_of(text, tokenizer, context, most)]


def contexts_of(text: str, tokenizer: Tokenizer, context: int, most: int | None = None) -> NDArray[np.int32]:
    """Tokenize a text and return the first `most` chunks as int32[chunks, context], with BOS as in `chunks_of`.

    Raises UsageError if the text does not fill a chunk.
    """
    tokens = tokens_of(text, tokenizer)
    if len(tokens) < context:
        hint = f"use a longer text, or --context {len(tokens)}" if len(tokens) >= LEAST_CONTEXT else "use a longer text"
        raise UsageError(f"--text: {len(tokens):,} tokens do not fill a chunk of {context:,}", hint=hint)
    chunks = tokens[: len(tokens) // context * context].reshape(-1, context)[:most].copy()
    if (bos := added_bos(tokenizer)) is not None:
        chunks[:, 0] = bos
    return chunks


def one_chunk(tokens: Sequence[int] | NDArray[np.int32]) -> Chunk:
    """Return a chunk in which every token but the first is scored."""
    return _chunk(np.asarray(tokens, np.int32), 0)


def tokens_of(text: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Tokenize a text as the beginning of a document: with BOS if the vocabulary requires it, but without EOS."""
    tokens = tokenizer.encode(text, add_special=True, parse_special=False)
    return tokens[:-1] if len(tokens) and tokens[-1] == tokenizer.eos_id != tokenizer.bos_id else tokens


def added_bos(tokenizer: Tokenizer) -> int | None:
    """Return the BOS token if the vocabulary requires one at the beginning of a text, or else None."""
    begun = tokenizer.encode("a", add_special=True, parse_special=False)
    return tokenizer.bos_id if len(begun) and begun[0] == tokenizer.bos_id else None


def _chunk(tokens: NDArray[np.int32], first: int) -> Chunk:
    return Chunk(tokens[:-1].copy(), first, tokens[first + 1 :])
