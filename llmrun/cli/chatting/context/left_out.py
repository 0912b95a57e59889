"""Decides how many of the oldest turns to leave out, so that the prompt fits in the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

ROOM: Final = 512  # tokens reserved for an answer without a length limit; most answers are shorter
_MOST_ROOM = 1 / 4  # maximum share of the context for the answer, since a small context would hold little else
# The share of the context to keep. Dropping many turns at once saves time, because each change of the prompt's
# beginning means that the prompt must be prefilled again.
_KEPT = 1 / 2


def room_for_answer(context: int, max_tokens: int | None) -> int:
    """Return how many tokens of the context to reserve for the answer."""
    return max(1, min(max_tokens or ROOM, ROOM, int(_MOST_ROOM * context)))


def turns_to_leave_out(
    turns: int, already: int, tokens_from: Callable[[int], int], *, context: int, max_tokens: int | None
) -> int:
    """Return how many of the oldest turns to leave out.

    If `already` turns are enough to leave room for the answer, the number stays the same. Otherwise, it is raised until
    the prompt fills at most half of the context. The last turn, which is the question itself, always stays.

    tokens_from  returns the number of tokens of the prompt that begins with the turn at this index
    """
    already = min(already, turns - 1)
    if tokens_from(already) + room_for_answer(context, max_tokens) <= context:
        return already
    most = int(_KEPT * context)
    return bisect_left(range(turns - 1), True, lo=already, key=lambda first: tokens_from(first) <= most)
