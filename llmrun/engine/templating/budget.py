"""What one rendering may cost. Whoever does work for a template asks here first, and says how much it will be.

Three things are bounded. *Steps* are fuel: one is about 0.1 us, and every loop, macro, filter and method spends them in
proportion to its work, so a template ends at the same place on every machine. *Bytes*: no single value may be larger
than `longest`, and all that were made and are still in use together no larger than `most_held`. *Time* is the backstop,
for a slow machine: the clock is read every 20,000 steps, some 2 ms apart. It is this thread's CPU time, so that other
programs at work do not make a template refused.

All of it grows with what the user gave: a message of 10 MB is rendered. What a template makes out of nothing is not.
"""

from __future__ import annotations

from sys import getrefcount, getsizeof
from time import thread_time
from typing import Any, TypeVar

STEPS = 1_000_000  # of 70 real templates none takes more than 30,000 for a few messages and tools
STEPS_PER_NODE = 8_000  # of the conversation; a real template that looks back in 1,000 messages needs 5,500
LONGEST_VALUE = 1 << 24  # bytes
MOST_HELD = 64 << 20  # bytes
UNCOUNTED = 1 << 24  # bytes made between two looks at which of them are still in use
SECONDS = 1.4  # from the start, compiling included; then one operation more, 0.2 at most
DEEPEST_CALL = 100  # macros in macros; each is five Python frames of the thousand there are
_LOOK_EVERY = 20_000  # steps
_SMALL = 64  # bytes; smaller values are not registered: making one costs 4 steps or more, so 16 MB is the most

T = TypeVar("T")


class OverBudget(Exception):  # named for what happened, as the errors of this project are
    """The template asks for more than it gets. `line` is known when it was refused before it ran."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class Budget:
    """The account of one rendering.

    nodes  values in the conversation, each item of a list or dict counted
    size   bytes of their text
    start  `thread_time` when the rendering began
    """

    __slots__ = (
        "_deadline",
        "_look",
        "_made",
        "_most_held",
        "_most_steps",
        "_registry",
        "_uncounted",
        "depth",
        "longest",
        "steps",
    )

    def __init__(self, nodes: int, size: int, start: float) -> None:
        self.steps = self._most_steps = STEPS + STEPS_PER_NODE * nodes + size // 2
        self.longest = LONGEST_VALUE + 8 * size
        self.depth = 0
        self._look = self.steps - _LOOK_EVERY
        self._deadline = start + SECONDS + size * 1e-7
        self._most_held = MOST_HELD + 16 * size
        self._uncounted = UNCOUNTED + size
        self._registry: list[Any] = []
        self._made = 0

    def spend(self, steps: int) -> None:
        """Raises OverBudget when the steps or the time are used up."""
        self.steps -= steps
        if self.steps < self._look:
            self._check()

    def scan(self, size: int) -> None:
        """Before C code goes once over `size` characters: 3 ns each in the worst case (a search that nearly finds)."""
        self.spend(size >> 5)

    def allow(self, size: int, what: str) -> None:
        """Before `what` makes a value of up to `size` bytes."""
        if size > self.longest:
            raise OverBudget(f"{what} would make {size:,} bytes, limit {self.longest:,}")
        self.steps -= size >> 7
        if self.steps < self._look:
            self._check()

    def keep(self, value: T) -> T:
        """Every value of more than a few bytes that was made for the template passes here."""
        size = getsizeof(value)
        if size > _SMALL:
            self._registry.append(value)
            self._made += size
            if self._made > self._uncounted:
                self._count()
        return value

    def keep_all(self, values: list[T]) -> list[T]:
        """A list that was made, and its items that were made with it."""
        large = [value for value in values if getsizeof(value) > _SMALL]
        self._registry += large
        self._made += sum(map(getsizeof, large))
        self.spend(8 * len(values))
        return self.keep(values)

    def close(self) -> None:
        """Lets go of every value."""
        self._registry.clear()

    def _check(self) -> None:
        if self.steps < 0:
            raise OverBudget(f"it takes more than {self._most_steps:,} steps")
        if thread_time() > self._deadline:
            raise OverBudget(f"it takes longer than {SECONDS} s")
        self._look = max(self.steps - _LOOK_EVERY, 0)

    def _count(self) -> None:
        """Lets go of what nobody else holds any more, and adds up the rest.

        `{% set ns.text = ns.text ~ more %}` a thousand times over makes a gigabyte, and holds a megabyte.
        """
        values = {id(value): value for value in self._registry}
        self._registry.clear()
        self._registry = _in_use(values, _NOBODY)
        self._made = 0
        held = sum(map(getsizeof, self._registry))
        self.spend(2 * len(self._registry))
        if held > self._most_held:
            raise OverBudget(f"it holds {held:,} bytes at once, limit {self._most_held:,}")


def _in_use(values: dict[int, Any], nobody: int) -> list[Any]:
    """Those with more than `nobody` references, oldest first. Takes all out of `values`."""
    used = []
    while values:
        value = None  # lets go of the one before, and so of what only that held: a list is made after its items
        _, value = values.popitem()
        if getrefcount(value) > nobody:
            used.append(value)
    used.reverse()
    return used


# References to a value that nobody but `_in_use` has: versions of Python differ.
_NOBODY = next(count for count in range(9) if not _in_use({0: []}, count))
