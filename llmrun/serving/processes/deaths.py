"""Decides what happens to the requests of a process that has ended: replay, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmrun.base.errors import BackendCrashed, Unavailable
from llmrun.engine.child.messages import cancelled_unbegun
from llmrun.serving.processes.request import Phase, ServedRequest

MOST_DEATHS: Final = 2
_MOST_UNPREPARED: Final = 3  # one more, because a process that is killed from outside is always preparing something


def sort_out(
    requests: Sequence[ServedRequest],
    alone: ServedRequest | None,
    preparing: ServedRequest | None,
    *,
    batch_invariant: bool,
    reason: str,
) -> None:
    """End the requests that cannot be replayed, and return the others to the server's own queue.

    alone      the request whose first step was running alone when the process ended, or None
    preparing  the last request that the process has begun to prepare, or None
    reason     how the process ended, for error messages

    Requests that had not begun are replayed any number of times. Requests that had begun are replayed once, but a death
    counts only against `alone` if there is such a request. Without batch invariance, a repeated answer could differ
    from the text that the client already has.
    """
    for request in requests:
        if request.cancelled:
            request.take(cancelled_unbegun(request.id))
        elif request.phase is Phase.BEGUN and (alone is None or request is alone):
            request.deaths += 1
        elif request is preparing and request.phase is Phase.SENT:
            request.unprepared += 1
        if request.deaths >= MOST_DEATHS or request.unprepared >= _MOST_UNPREPARED:
            request.fail(ended_repeatedly(reason))
        elif request.phase is Phase.BEGUN and request.deltas.count and not batch_invariant:
            request.fail(Unavailable(f"the engine ended while it ran this request: {reason}", state="restarting"))
        request.phase = Phase.HELD
        request.deltas.start_again()


def ended_repeatedly(reason: str) -> BackendCrashed:
    """Return the error of a request that is not replayed again."""
    return BackendCrashed(f"the engine ended repeatedly while it ran this request: {reason}")


def replay_order(requests: Sequence[ServedRequest]) -> list[ServedRequest]:
    """Return the requests in the order in which to send them again: first those that had begun, then by age."""
    return sorted(requests, key=lambda request: (not request.has_begun, request.id))
