"""How many of the oldest turns of a conversation to leave out of a prompt, so that it fits in the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

ROOM: Final = 512  # tokens left for an answer of unlimited length: most answers are shorter
_MOST_ROOM = 1 / 4  # of the context: a small one would hold little else
_KEPT = 1 / 2  # of the context: every turn left out changes the beginning of the prompt, which is then prefilled again


def room_for_answer(context: int, max_tokens: int | None) -> int:
    """Return how many tokens of the context a prompt should leave for its answer."""
    return max(1, min(max_tokens or ROOM, ROOM, int(_MOST_ROOM * context)))


def turns_to_leave_out(
    turns: int, already: int, tokens_from: Callable[[int], int], *, context: int, max_tokens: int | None
) -> int:
    """Return how many of the oldest turns to leave out: `already`, if the rest leaves room for the answer, else so many
    that the rest fills at most half of the context. The last turn, the question itself, always stays.

    tokens_from  the tokens of the prompt that begins with the turn of this number, counted from 0
    """
    already = min(already, turns - 1)
    if tokens_from(already) + room_for_answer(context, max_tokens) <= context:
        return already
    most = int(_KEPT * context)
    return bisect_left(range(turns - 1), True, lo=already, key=lambda first: tokens_from(first) <= most)
