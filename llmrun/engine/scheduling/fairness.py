"""Decides which waiting request is admitted next, and which prompt receives the rows of a step.

These orders affect only the times of answers, never their text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, Protocol, TypeVar

# In every TURNS-th step, the prompt that has waited longest is first; in all other steps, the shortest prompt is.
TURNS: Final = 4
LONGEST_HEAD_START: Final = 10.0  # a short prompt can overtake a long one that is at most this many seconds older


class Queued(Protocol):
    """The attributes of an Answer that determine the order of admission."""

    prompt_tokens: int
    submitted: float

    @property
    def tenant(self) -> str: ...


Q = TypeVar("Q", bound=Queued)


class FairShares:
    """Shares the machine between tenants: the tenant that has used the fewest tokens is next.

    The counters are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
    2024). While two tenants have waiting requests, the numbers of tokens that the tenants receive differ by at most one
    largest request for each slot, however many requests each tenant sends.

    Unused capacity cannot be saved for later. A tenant that had no waiting requests is therefore lifted to the virtual
    time when the tenant returns, as in start-time fair queueing. The virtual time is the largest counter at which a
    request has been admitted, or that any tenant has reached while no request was waiting.
    """

    def __init__(self) -> None:
        self._used: dict[str, int] = {}  # a tenant that is not listed has used `_virtual_time`
        self._virtual_time = 0
        self._n_waiting = 0  # requests of the last order that have not been admitted
        self._ordered_at = -math.inf  # the time of the last order

    def used(self, tenant: str) -> int:
        """Return a tenant's counter. Only the differences between counters are meaningful."""
        return self._used.get(tenant, self._virtual_time)

    def admit(self, tenant: str, missing: int) -> None:
        """Charge a tenant for the prompt of a request that is admitted now."""
        self._virtual_time = max(self._virtual_time, self.used(tenant))
        self._n_waiting -= 1
        self.charge(tenant, missing)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge a tenant for generated tokens. A negative number refunds the tokens of a cancelled prompt."""
        self._used[tenant] = self.used(tenant) + tokens
        if self._n_waiting <= 0:
            self._virtual_time = max(self._virtual_time, self._used[tenant])

    def order(self, waiting: Iterable[Q], now: float, row_seconds: float) -> list[Q]:
        """Return all waiting requests in the order of admission.

        now          the time on the clock of `submitted`
        row_seconds  the seconds that a prompt token takes (`StepCosts.row_seconds`)

        The requests of a tenant are in the order in which their prompts would be complete if each prompt had run alone
        since its arrival. A short prompt can therefore overtake a long one, but only if the short one arrived at most
        LONGEST_HEAD_START later.
        """

        def rank(request: Q) -> float:
            return request.submitted + min(request.prompt_tokens * row_seconds, LONGEST_HEAD_START)

        queues: dict[str, list[Q]] = {}
        for request in waiting:
            queues.setdefault(request.tenant, []).append(request)
        self._lift(queues)
        self._ordered_at = now
        self._n_waiting = sum(map(len, queues.values()))
        heads: list[tuple[int, float, int, list[Q]]] = []  # a heap of tenants by counter, with their reversed queues
        for index, (tenant, queue) in enumerate(queues.items()):
            queue.sort(key=rank)
            queue.reverse()
            heads.append((self.used(tenant), rank(queue[-1]), index, queue))
        heapify(heads)
        order: list[Q] = []
        while heads:
            used, _, index, queue = heads[0]
            order.append(queue.pop())
            if queue:
                heapreplace(heads, (used + max(order[-1].prompt_tokens, 1), rank(queue[-1]), index, queue))
            else:
                heappop(heads)
        return order

    def _lift(self, queues: dict[str, list[Q]]) -> None:
        """Lift the counters of tenants that had no waiting requests when the last order was computed.

        Forget idle tenants that would be lifted when they return.
        """
        for tenant, queue in queues.items():
            used = self.used(tenant)
            returned = min(request.submitted for request in queue) > self._ordered_at
            self._used[tenant] = max(used, self._virtual_time) if returned else used
        self._used = {
            tenant: used for tenant, used in self._used.items() if tenant in queues or used > self._virtual_time
        }


def prompt_order(prompts: Sequence[tuple[int, int]], step: int) -> list[int]:
    """Return the indexes of the running prompts in the order in which they receive the rows of a step.

    prompts  for each prompt, how many of its tokens are not in the cache, and the number of the last step in which it
             had rows; at first, of the step in which it was admitted
    step     the number of the step; consecutive steps have consecutive numbers

    The shortest prompt is first. In every TURNS-th step, the prompt that has waited longest for rows is first, so that
    each of k prompts runs at least once in k * TURNS steps.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i][0])
    if order and step % TURNS == 0:
        first = min(order, key=lambda i: prompts[i][1])
        order.remove(first)
        order.insert(0, first)
    return order
