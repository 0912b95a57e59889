"""Decides how many of the oldest turns to leave out, to make the prompt fit in the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

ROOM: Final = 512  # tokens reserved for an answer without a length limit; most answers are shorter
_MOST_ROOM = 1 / 4  # maximum share of the context to reserve, because a small context needs room for the prompt
# The share of the context that the prompt may fill after turns are dropped. Dropping many turns at the same time saves
# time, because each change at the beginning of the prompt forces a new prefill.
_KEPT = 1 / 2


def room_for_answer(context: int, max_tokens: int | None) -> int:
    """Return how many tokens of the context to reserve for the answer."""
    return max(1, min(max_tokens or ROOM, ROOM, int(_MOST_ROOM * context)))


def turns_to_leave_out(
    turns: int, already: int, tokens_from: Callable[[int], int], *, context: int, max_tokens: int | None
) -> int:
    """Return how many of the oldest turns to leave out.

    If leaving out `already` turns makes enough room for the answer, return `already`. Otherwise, leave out more turns
    until the prompt fills at most half of the context. The last turn is the question itself and is never left out.

    tokens_from  returns the number of tokens in the prompt if it begins with the turn at the given index
    """
    already = min(already, turns - 1)
    if tokens_from(already) + room_for_answer(context, max_tokens) <= context:
        return already
    most = int(_KEPT * context)
    return bisect_left(range(turns - 1), True, lo=already, key=lambda first: tokens_from(first) <= most)
