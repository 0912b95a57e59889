"""A queue in which no tenant waits for all the work of another one."""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TurnQueue(Generic[Item]):
    """A thread-safe queue that serves urgent items first, and then the tenants in turn."""

    def __init__(self) -> None:
        self._urgent: deque[Item] = deque()
        self._items: dict[str, deque[Item]] = {}  # only tenants with items; the first one is next
        self._filled = Condition()

    def put(self, tenant: str, item: Item) -> None:
        with self._filled:
            self._items.setdefault(tenant, deque()).append(item)
            self._filled.notify()

    def put_first(self, item: Item) -> None:
        """Add an urgent item, which is served after earlier urgent ones."""
        with self._filled:
            self._urgent.append(item)
            self._filled.notify()

    def get(self) -> Item:
        """Wait for an item and return it. Its tenant then has its next turn after all others."""
        with self._filled:
            self._filled.wait_for(lambda: self._urgent or self._items)
            if self._urgent:
                return self._urgent.popleft()
            tenant = next(iter(self._items))
            items = self._items.pop(tenant)
            item = items.popleft()
            if items:
                self._items[tenant] = items
            return item
