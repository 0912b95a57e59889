"""Lets requests wait for a common prefix that a running request is still computing.

A request whose prompt begins like that of a running one waits until the running one has computed the common prefix, and
then copies it. Without this, eight samples of a prompt of 1,000 tokens would compute 8,000 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from llmrun.engine.answer import Answer, PrefixWait
from llmrun.engine.prefix_tree import common_prefix

if TYPE_CHECKING:
    from llmrun.engine.slots import Slot

# Waiting can delay a request by a step, which costs about as much as 8 to 16 rows of a prompt.
LEAST_SHARED: Final = 16  # tokens


def wait_for_prefix(answer: Answer, running: Mapping[Answer, Slot], cached: int) -> PrefixWait | None:
    """Return the prefix that a request should wait for, or None if it should start.

    cached  how many of its tokens are in the cache already
    """
    tokens = answer.cached_as
    waits = [
        PrefixWait(leader, min(common_prefix(leader.cached_as, tokens), len(tokens) - 1))
        for leader, slot in running.items()
        if leader.prefix_scope == answer.prefix_scope and len(leader.tokens) - len(slot.tokens) > 1
    ]
    longest = max(waits, key=lambda wait: wait.n, default=None)
    return longest if longest and longest.n - cached >= LEAST_SHARED else None


def is_over(wait: PrefixWait, running: Mapping[Answer, Slot]) -> bool:
    """Return whether the leader has computed the prefix, or never will, for example because it was cancelled."""
    slot = running.get(wait.leader)
    return slot is None or len(slot.tokens) >= wait.n


def rows_until_copy(leader: Answer, slot: Slot, waiting: Iterable[Answer]) -> int:
    """Return how many rows the leader may run before a waiting request copies its tokens.

    The step must end there, because a recurrent state can be copied only at its current position.
    """
    ends = [each.wait.n for each in waiting if each.wait is not None and each.wait.leader is leader]
    return min((end for end in ends if end > len(slot.tokens)), default=len(leader.tokens)) - len(slot.tokens)
