"""Recovers the scores of a SentencePiece vocabulary from the merges in tokenizer.json.

SentencePiece merges the two neighbors whose combination has the best score. For such a vocabulary, transformers writes
a BPE model that lists all pairs of tokens whose combination is a token, in the order of these scores. The order is
enough: with the negative rank as its score, text is split in the same way.

Old versions of transformers took the best score, which is 0, for a missing one, and left out the pairs of that token.
The files of Llama 2 and Mistral 7B were made by them. The token is two spaces, and here it gets its score back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Merge = tuple[str, str]
_MOST_CHARACTERS = 1024  # in a token, because the pairs of a token take quadratic time


def scores_of(tokens: Sequence[str], merges: Sequence[Merge], mergeable: Sequence[str]) -> NDArray[np.float32] | None:
    """Return a score for each token, float32[tokens], or None if scores cannot express the merges.

    mergeable  the tokens that may be the result of a merge, or a part of one, in the order of their IDs

    Scores express merges if all pairs that form the same token are listed one after another, no pair that forms a token
    is missing, and all characters of these tokens are tokens. Tokens are much shorter than _MOST_CHARACTERS.
    """
    if any(len(token) > _MOST_CHARACTERS for token in mergeable):
        return None
    ranks: dict[str, int] = {}
    last = ""
    for left, right in merges:
        combined = left + right
        if combined != last and combined in ranks:
            return None
        last = combined
        ranks.setdefault(combined, 1 + len(ranks))
    known, listed = set(mergeable), set(merges)
    unlisted = [token for token in mergeable if any(pair not in listed for pair in _pairs(token, known))]
    if unlisted == list(mergeable[:1]) and unlisted[0] not in ranks:
        ranks[unlisted[0]] = 0
    elif unlisted:
        return None
    if not {character for token in mergeable for character in token} <= known:
        return None
    return np.array([-ranks.get(token, 1 + len(ranks)) for token in tokens], np.float32)


def _pairs(token: str, known: set[str]) -> list[Merge]:
    """Return the pairs of known tokens that form a token."""
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    return [(left, right) for left, right in pairs if left in known and right in known]
