"""The limits of a served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.base.errors import Overloaded

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits that keep one client from harming the others.

    max_queue      the maximum number of requests that wait for their first step, and of other calls
    tenants        the number of tenants; if there are several, one can have at most half of the queue
    queue_bytes    the maximum size of the messages of a tenant's waiting requests; a single request may be larger
    unread_bytes   the maximum size of an answer's events that its client has not read
    stuck_s        the time without a step after which the engine is restarted, if its steps are short
    first_pause_s  the pause before the second restart in a row, which doubles with each further one
    max_pause_s    the longest pause
    healthy_s      how long the engine must run until the next restart counts as the first one again
    """

    max_queue: int = 256
    tenants: int = 1
    queue_bytes: int = 16 * MIB
    unread_bytes: int = MIB
    stuck_s: float = 10.0
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0
    healthy_s: float = 60.0

    def check_room(self, waiting: Sequence[tuple[str, int]], tenant: str, n_bytes: int, retry_after: float) -> None:
        """Raise Overloaded if a tenant may not send another message of this size.

        waiting  the tenant and the size of each message that waits
        """
        own = [size for owner, size in waiting if owner == tenant]
        if len(waiting) >= self.max_queue:
            reason = f"{len(waiting)} requests are waiting"
        elif len(own) >= self.share_of(self.max_queue):
            reason = f"{len(own)} requests with this API key are waiting, the limit for one key"
        elif own and sum(own) + n_bytes > self.share_of(self.queue_bytes):
            most = self.share_of(self.queue_bytes)
            whose = " with this API key" if self.tenants > 1 else ""
            reason = f"the waiting requests{whose} have {sum(own):,} bytes, the limit is {most:,}"
        else:
            return
        raise Overloaded(f"the queue is full: {reason}", retry_after=retry_after)

    def share_of(self, limit: int) -> int:
        """Return the part of a limit that one tenant may use."""
        return limit if self.tenants == 1 else -(-limit // 2)
