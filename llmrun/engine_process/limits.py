"""The limits of a served model."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits that keep one client from harming the others.

    max_queue      the maximum number of requests that wait for their first step
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

    def share_of(self, limit: int) -> int:
        """Return the part of a limit that one tenant may use."""
        return limit if self.tenants == 1 else -(-limit // 2)
