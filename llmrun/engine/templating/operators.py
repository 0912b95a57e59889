"""Operators, each of which looks at the size of what it will make, or go through, before it does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinja2.runtime import Undefined
from markupsafe import Markup

from llmrun.engine.templating.budget import OverBudget
from llmrun.engine.templating.formatting import check_percent_format
from llmrun.engine.templating.values import (
    SCALARS,
    VIEWS,
    WIDEST_INTEGER,
    Lazy,
    bytes_of,
    check_integer,
    hashable,
    iterable,
    measure,
    text_of,
)

if TYPE_CHECKING:
    from llmrun.engine.templating.budget import Budget
    from llmrun.engine.templating.environment import ChatSandbox

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}
_LONG = 4096  # characters; comparing or searching shorter texts costs no more than the call


def calculate(budget: Budget, sign: str, left: Any, right: Any) -> Any:
    """`left sign right` for the arithmetic signs."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        _check_numbers(sign, left, right)
        return check_integer(_BINARY[sign](left, right))
    if isinstance(left, str):
        if sign == "+" and isinstance(right, str):
            budget.allow(joined_bytes(left, right), "the operator +")
            return budget.keep(left + right)
        if sign == "%":
            budget.allow(check_percent_format(budget, left, right), "the operator %")
            return budget.keep(left % right)
    if sign == "+" and isinstance(left, list | tuple):
        if isinstance(right, list | tuple):
            budget.allow(8 * (len(left) + len(right)), "the operator +")
        return budget.keep(left + right)
    if sign == "*":
        return _repeat(budget, left, right)
    if not all(type(value) in SCALARS or isinstance(value, Undefined) for value in (left, right)):
        kinds = f"{type(left).__name__!r} and {type(right).__name__!r}"
        raise TypeError(f"unsupported operand type(s) for {sign}: {kinds}")
    return _BINARY[sign](left, right)


def negate(sign: str, value: Any) -> Any:
    """A sign before a value."""
    return check_integer(-value if sign == "-" else +value)


def joined_bytes(left: str, right: str) -> int:
    """At most so many bytes has `left + right`, a Markup on one side escaping the other."""
    longest_escape = 6 if isinstance(left, Markup) or isinstance(right, Markup) else 1
    if left.isascii() and right.isascii():
        return (len(left) + len(right)) * longest_escape
    return 4 * (len(left) + len(right)) * longest_escape


def concatenate(sandbox: ChatSandbox, values: tuple[Any, ...]) -> str:
    """`~`: the texts of all values, one after the other."""
    budget = sandbox.budget
    return join_texts(budget, "", [text_of(value, budget) for value in values], "the operator ~")


def join_texts(budget: Budget, between: str, texts: list[str], what: str) -> str:
    """`between.join(texts)`, which may not be Markup."""
    length = sum(map(len, texts)) + len(between) * len(texts)
    if length > _LONG:
        wide = not (between.isascii() and all(map(str.isascii, texts)))
        budget.allow(4 * length if wide else length, what)
    return budget.keep(between.join(texts))


def compare(sandbox: ChatSandbox, left: Any, order: str, right: Any) -> Any:
    """`left order right` for Jinja2's names of the comparisons, `in` and `not in` among them."""
    if order == "in":
        return contains(sandbox.budget, right, left)
    if order == "notin":
        return not contains(sandbox.budget, right, left)
    before_comparing(sandbox.budget, left, right)
    return _ORDER[order](left, right)


def compare_all(sandbox: ChatSandbox, first: Any, *orders: Any) -> Any:
    """`a < b < c`: orders are "lt", b, "lt", c. All operands have been evaluated, which Python would not do."""
    result: Any = True
    for order, value in zip(orders[::2], orders[1::2], strict=True):
        result = compare(sandbox, first, order, value)
        if not result:
            return result
        first = value
    return result


def before_comparing(budget: Budget, left: Any, right: Any) -> None:
    """Pays for one comparison."""
    if type(left) in SCALARS or type(right) in SCALARS:
        if isinstance(left, str) and isinstance(right, str) and len(left) > _LONG:
            budget.scan(min(len(left), len(right)))
        return
    measure(left, budget)
    measure(right, budget)


def contains(budget: Budget, container: Any, item: Any) -> bool:
    """`item in container`."""
    if isinstance(container, str):
        if isinstance(item, str) and len(container) > _LONG:
            budget.spend(search_steps(len(container), len(item)))
        return item in container
    if isinstance(container, dict) or type(container) is VIEWS[0]:
        return hashable(item, budget) in container
    if isinstance(container, Lazy):
        return any(_equal(budget, other, item) for other in container)
    before_finding(budget, iterable(container), item)
    return item in container


def before_finding(budget: Budget, items: Any, item: Any) -> None:
    """Pays for comparing an item with each of a list's."""
    if isinstance(items, Undefined):
        return
    if type(item) in SCALARS:
        length = len(item) if isinstance(item, str) else 0
        budget.spend(len(items) + (len(items) * length >> 8))
    else:
        measure(items, budget)
        size = measure(item, budget)
        budget.spend(len(items) * size.nodes)


def search_steps(length: int, sought: int) -> int:
    """For looking for `sought` characters in `length`, from the front: Python's search is linear in long texts only."""
    quadratic = length * min(sought, length) >> 10 if length < 30_000 else 0
    return (length >> 5) + quadratic


def slice_of(sandbox: ChatSandbox, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`."""
    if isinstance(value, str | list | tuple | range | Undefined):
        part = value[slice(start, stop, step)]
        if part is not value:
            sandbox.budget.spend(len(part) >> 5)
            sandbox.budget.keep(part)
        return part
    raise TypeError(f"{type(value).__name__!r} object has no slices")


def _equal(budget: Budget, left: Any, right: Any) -> bool:
    before_comparing(budget, left, right)
    return left is right or bool(left == right)


def _check_numbers(sign: str, left: float, right: float) -> None:
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    if sign == "**" and abs(left) > 1 and left.bit_length() * max(right, 0) > 2 * WIDEST_INTEGER:
        raise OverBudget(f"the operator ** would make an integer of more than {WIDEST_INTEGER} bits")
    if max(left.bit_length(), right.bit_length()) > 1 << 15:
        raise OverBudget(f"the operator {sign} on an integer of more than {1 << 15:,} bits")


def _repeat(budget: Budget, left: Any, right: Any) -> Any:
    items, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int) and isinstance(items, str | list | tuple):
        once = bytes_of(items) if isinstance(items, str) else 8 * len(items)
        budget.allow(once * max(times, 0), "the operator *")
        return budget.keep(left * right)
    if isinstance(left, Undefined) or isinstance(right, Undefined):
        return left * right
    raise TypeError(f"cannot multiply {type(left).__name__!r} by {type(right).__name__!r}")
