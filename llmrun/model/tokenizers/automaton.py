"""Compiles a pattern into a transition table for a kernel that does one lookup per character and never backtracks.

The table finds the match that a backtracking matcher would find first. It is a DFA that precomputes Thompson's NFA
simulation. A state is the list of positions in the pattern that may come next, in order of preference. When one of them
reaches the end of the pattern, the positions after it in the list are dropped. The match ends where the end of the
pattern was last reached. A lookahead depends on the character after the match, so a match is recorded one step late, as
a flag of the transition.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.formats.layouts.splits import ENDS_HERE, NO_WAY_ON, ROW_SHIFT
from llmrun.model.tokenizers.patterns import Ahead, Choice, Node, OneOf, Repeat, Sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.tokenizers.code_points import CodePoints


@dataclass(frozen=True, slots=True)
class _Take:
    """A step that consumes one character, which must be in the set with this index."""

    set_number: int
    after: int


@dataclass(frozen=True, slots=True)
class _Look:
    """A step that requires the next character, if there is one, to be in the set, without consuming it."""

    set_number: int
    after: int


@dataclass(frozen=True, slots=True)
class _Fork:
    """A step that branches to several others, in order of preference."""

    after: tuple[int, ...]


_Step = _Take | _Look | _Fork | None  # None is the end of the pattern


def sets_of(node: Node) -> list[CodePoints]:
    """Return the sets of code points in a pattern, in the order of the rows of `membership` in `transitions`."""
    if isinstance(node, OneOf | Ahead):
        return [node.members]
    parts = (node.part,) if isinstance(node, Repeat) else node.parts
    return [members for part in parts for members in sets_of(part)]


def transitions(node: Node, membership: NDArray[np.bool_], n_symbols: int) -> NDArray[np.int32]:
    """Build a pattern's transition table, int32[states, n_symbols + 2].

    Each state has a row, and each symbol of the next character has a column. The last two columns are for continuation
    bytes of UTF-8 characters and for the end of the text. Row 0 is the start state. An entry combines the byte offset
    of the next row, shifted left by ROW_SHIFT, with the flag ENDS_HERE if a match ends before this character, and the
    flag NO_WAY_ON if there is no next row. `membership` is bool[sets of the pattern, n_symbols].
    """
    return _Walker(_steps_of(node), membership, n_symbols).table()


def _steps_of(node: Node) -> list[_Step]:
    """Return the pattern's steps. The first is the end of the pattern, and the last is the start."""
    steps: list[_Step] = [None]
    numbers: dict[int, int] = {}
    _number_sets(node, numbers, 0)
    steps.append(_Fork((_compile(node, 0, steps, numbers),)))
    return steps


def _number_sets(node: Node, numbers: dict[int, int], count: int) -> int:
    """Assign indices to the sets of a node in the order of `sets_of`, from `count` up. Returns the next free index."""
    if isinstance(node, OneOf | Ahead):
        numbers[id(node)] = count
        return count + 1
    for part in (node.part,) if isinstance(node, Repeat) else node.parts:
        count = _number_sets(part, numbers, count)
    return count


def _compile(node: Node, after: int, steps: list[_Step], numbers: dict[int, int]) -> int:
    """Append the steps of a node, which continue at the step with index `after`. Returns the index of the first."""

    def add(step: _Step) -> int:
        steps.append(step)
        return len(steps) - 1

    if isinstance(node, OneOf):
        return add(_Take(numbers[id(node)], after))
    if isinstance(node, Ahead):
        return add(_Look(numbers[id(node)], after))
    if isinstance(node, Sequence):
        for part in reversed(node.parts):
            after = _compile(part, after, steps, numbers)
        return after
    if isinstance(node, Choice):
        return add(_Fork(tuple([_compile(part, after, steps, numbers) for part in node.parts])))
    if node.most is None:
        loop = add(None)
        steps[loop] = _Fork((_compile(node.part, loop, steps, numbers), after))
        first = loop
    else:
        first = after
        for _ in range(node.most - node.least):
            first = add(_Fork((_compile(node.part, first, steps, numbers), after)))
    for _ in range(node.least):
        first = _compile(node.part, first, steps, numbers)
    return first


class _Walker:
    """Builds the table. A state is the tuple of steps that may come next, in order of preference."""

    def __init__(self, steps: Ordered[_Step], membership: NDArray[np.bool_], n_symbols: int) -> None:
        self._steps = steps
        self._members = [set(np.flatnonzero(row).tolist()) for row in membership]
        self._n_symbols = n_symbols
        self._end = n_symbols + 1

    def table(self) -> NDArray[np.int32]:
        """Return the transition table."""
        start: tuple[int, ...] = (len(self._steps) - 1,)
        numbers = {start: 0}
        waiting = [start]
        row_bytes = 4 * (self._n_symbols + 2)
        rows: list[list[int]] = []
        for state in waiting:  # the loop appends new states
            row = []
            for follow, matched in self._followers(state):
                entry = ENDS_HERE if matched else 0
                if not follow:
                    row.append(entry | NO_WAY_ON)
                    continue
                if follow not in numbers:
                    numbers[follow] = len(waiting)
                    waiting.append(follow)
                row.append(entry | numbers[follow] * row_bytes << ROW_SHIFT)
            row.insert(self._n_symbols, len(rows) * row_bytes << ROW_SHIFT)
            rows.append(row)
        return np.array(rows, np.int32)

    def _followers(self, state: tuple[int, ...]) -> list[tuple[tuple[int, ...], bool]]:
        """Return (next state, whether a match ends before it) for every symbol, then for the end of the text."""
        result: list[tuple[tuple[int, ...], bool]] = []
        known: tuple[list[_Take], bool] | None = None
        for symbol in (*range(self._n_symbols), self._end):
            takes, matched = known or self._reached(state, symbol)
            if known is None and not self._looked:
                known = takes, matched
            after = [take.after for take in takes if symbol in self._members[take.set_number]]
            result.append((tuple(dict.fromkeys(after)), matched))
        return result

    def _reached(self, state: tuple[int, ...], symbol: int) -> tuple[list[_Take], bool]:
        """Follow all branches from a state, given the symbol of the next character.

        Returns the _Take steps reached, in order of preference, and whether the pattern's end is reached. If it is, the
        steps with a lower preference than the end are left out.
        """
        self._looked = False
        takes: list[_Take] = []
        seen: set[int] = set()
        waiting = list(reversed(state))
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            step = self._steps[number]
            if step is None:
                return takes, True
            if isinstance(step, _Take):
                takes.append(step)
            elif isinstance(step, _Fork):
                waiting += reversed(step.after)
            else:
                self._looked = True
                if symbol == self._end or symbol in self._members[step.set_number]:
                    waiting.append(step.after)
        return takes, False
