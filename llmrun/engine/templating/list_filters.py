"""The filters that go through items. Lazy where Jinja2's are, and every item is paid for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import FilterArgumentError
from jinja2.runtime import Undefined

from llmrun.engine.templating.operators import calculate, join_texts
from llmrun.engine.templating.values import Group, Lazy, bytes_of, iterable, key, lazy, measure, text_of

if TYPE_CHECKING:
    from llmrun.engine.templating.environment import ChatSandbox

_ITEM = 5  # steps


def items_of(sandbox: ChatSandbox, value: Any) -> Iterator[Any]:
    """The items a filter goes through, each paid for."""
    return _paid(sandbox, iterable(value))


def _paid(sandbox: ChatSandbox, items: Iterable[Any]) -> Iterator[Any]:
    budget = sandbox.budget
    for item in items:
        budget.spend(_ITEM)
        yield item


def _listed(sandbox: ChatSandbox, value: Any) -> list[Any]:
    if isinstance(value, str) and not value.isascii():
        sandbox.budget.allow(88 * len(value), "list")
        return sandbox.budget.keep_all(list(value))
    if isinstance(value, str | list | tuple | dict | range):
        sandbox.budget.allow(36 * len(value), "list")
        sandbox.budget.spend(2 * len(value))
        return sandbox.budget.keep(list(value))
    return sandbox.budget.keep(list(items_of(sandbox, value)))


def _getter(sandbox: ChatSandbox, attribute: Any, *, default: Any = None, lower: bool = False) -> Callable[[Any], Any]:
    """What `attribute="user.name"` or `attribute=0` reads from an item; `lower` for comparing without case."""
    parts: list[Any] = []
    if isinstance(attribute, str):
        sandbox.budget.spend(len(attribute))
        parts = [int(part) if part.isdigit() else part for part in attribute.split(".")]
    elif attribute is not None:
        parts = [attribute]

    def read(item: Any) -> Any:
        for part in parts:
            sandbox.budget.spend(_ITEM)
            item = sandbox.getitem(item, part)
            if default is not None and isinstance(item, Undefined):
                item = default
        if lower and isinstance(item, str):
            sandbox.budget.allow(3 * bytes_of(item), "lower")
            return sandbox.budget.keep(item.lower())
        return item

    return read


def _keyed(
    sandbox: ChatSandbox, value: Any, read: Callable[[Any], Any], *, sorting: bool = False
) -> tuple[list[Any], list[Any]]:
    """Items and their keys, with what comparing the keys will cost paid for."""
    items = _listed(sandbox, value)
    keys = [read(item) for item in items]
    size = measure(keys, sandbox.budget)
    rounds = len(items).bit_length() if sorting else 1
    sandbox.budget.spend(rounds * (size.nodes + (size.characters >> 6)))
    return items, keys


def _ordered(items: list[Any], keys: list[Any], reverse: bool) -> list[int]:
    return sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)


def _sort(
    sandbox: ChatSandbox, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    names = attribute.split(",") if isinstance(attribute, str) else [attribute]
    getters = [_getter(sandbox, name, lower=not case_sensitive) for name in names]
    items, keys = _keyed(sandbox, value, lambda item: [read(item) for read in getters], sorting=True)
    return sandbox.budget.keep([items[index] for index in _ordered(items, keys, reverse)])


def _dictsort(
    sandbox: ChatSandbox, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
) -> list[Any]:
    if by not in ("key", "value"):
        raise FilterArgumentError('You can only sort by either "key" or "value"')
    return _sort(sandbox, _items_of_mapping(value), reverse, case_sensitive, 0 if by == "key" else 1)


def _items_of_mapping(value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__!r} object has no items")
    return value.items()


def _unique(sandbox: ChatSandbox, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Lazy:
    def unique() -> Iterator[Any]:
        read = _getter(sandbox, attribute, lower=not case_sensitive)
        seen = set()
        for item in items_of(sandbox, value):
            found = key(read(item))
            if found not in seen:
                sandbox.budget.spend(6)
                seen.add(found)
                yield item

    return lazy(sandbox.budget, unique(), value)


def _extreme(name: str, choose: Callable[..., int]) -> Callable[..., Any]:
    def run(sandbox: ChatSandbox, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        items, keys = _keyed(sandbox, value, _getter(sandbox, attribute, lower=not case_sensitive))
        if not items:
            return sandbox.undefined(f"No item for {name}, sequence was empty.")
        return items[choose(range(len(items)), key=keys.__getitem__)]

    return run


def _groupby(
    sandbox: ChatSandbox, value: Any, attribute: Any, default: Any = None, case_sensitive: bool = False
) -> list[Group]:
    read = _getter(sandbox, attribute, default=default)
    compared = _getter(sandbox, attribute, default=default, lower=not case_sensitive)
    items, keys = _keyed(sandbox, value, compared, sorting=True)
    groups = []
    for _, indices in groupby(_ordered(items, keys, reverse=False), keys.__getitem__):
        members = sandbox.budget.keep([items[index] for index in indices])
        groups.append(sandbox.budget.keep(Group(read(members[0]), members)))
    return sandbox.budget.keep(groups)


def _batch(sandbox: ChatSandbox, value: Any, linecount: int, fill_with: Any = None) -> Lazy:
    def batches() -> Iterator[list[Any]]:
        line: list[Any] = []
        for item in items_of(sandbox, value):
            if len(line) == linecount:
                yield sandbox.budget.keep(line)
                line = []
            line.append(item)
        if line:
            if fill_with is not None and len(line) < linecount:
                sandbox.budget.allow(8 * linecount, f"batch({linecount})")
                line += [fill_with] * (linecount - len(line))
            yield sandbox.budget.keep(line)

    return lazy(sandbox.budget, batches(), value)


def _slice(sandbox: ChatSandbox, value: Any, slices: int, fill_with: Any = None) -> Lazy:
    def columns() -> Iterator[list[Any]]:
        items = _listed(sandbox, value)
        each, longer = divmod(len(items), slices)
        start = 0
        for number in range(slices):
            sandbox.budget.spend(2 * _ITEM)
            end = start + each + (number < longer)
            column = items[start:end]
            if fill_with is not None and number >= longer:
                column.append(fill_with)
            start = end
            yield sandbox.budget.keep(column)

    return lazy(sandbox.budget, columns(), value)


def _join(sandbox: ChatSandbox, value: Any, d: Any = "", attribute: Any = None) -> str:
    read = _getter(sandbox, attribute)
    budget = sandbox.budget
    texts = [text_of(read(item), budget) for item in items_of(sandbox, value)]
    return join_texts(budget, text_of(d, budget), texts, "join")


def _sum(sandbox: ChatSandbox, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if isinstance(start, str):
        raise TypeError("sum adds numbers, not text")
    read = _getter(sandbox, attribute)
    total = start
    for item in items_of(sandbox, value):
        total = calculate(sandbox.budget, "+", total, read(item))
    return total


def _first(sandbox: ChatSandbox, value: Any) -> Any:
    return next(iter(iterable(value)), sandbox.undefined("No first item, sequence was empty."))


def _last(sandbox: ChatSandbox, value: Any) -> Any:
    if isinstance(value, Lazy):
        raise TypeError("'generator' object is not reversible")
    return next(reversed(iterable(value)), sandbox.undefined("No last item, sequence was empty."))


def _reverse(sandbox: ChatSandbox, value: Any) -> Any:
    if isinstance(value, str):
        return sandbox.budget.keep(value[::-1])
    if isinstance(value, Lazy):
        return sandbox.budget.keep(_listed(sandbox, value)[::-1])
    return lazy(sandbox.budget, _paid(sandbox, reversed(iterable(value))), value)


def _items(sandbox: ChatSandbox, value: Any) -> Lazy:
    def pairs() -> Iterator[Any]:
        if not isinstance(value, Undefined):
            yield from items_of(sandbox, _items_of_mapping(value))

    return lazy(sandbox.budget, pairs(), value)


def _map(sandbox: ChatSandbox, value: Any, /, *arguments: Any, **named: Any) -> Lazy:
    def mapped() -> Iterator[Any]:
        if not value:
            return
        if not arguments and "attribute" in named:
            change = _getter(sandbox, named.pop("attribute"), default=named.pop("default", None))
            if named:
                raise FilterArgumentError(f"Unexpected keyword argument {next(iter(named))!r}")
        elif arguments:
            run = sandbox.offered(sandbox.filters, "filter", arguments[0])

            def change(item: Any) -> Any:
                return run(item, *arguments[1:], **named)
        else:
            raise FilterArgumentError("map requires a filter argument")
        for item in items_of(sandbox, value):
            yield change(item)

    return lazy(sandbox.budget, mapped(), value)


def _chooser(*, keep: bool, of_attribute: bool) -> Callable[..., Lazy]:
    """select, reject, selectattr, rejectattr."""

    def run(sandbox: ChatSandbox, value: Any, /, *arguments: Any, **named: Any) -> Lazy:
        def chosen() -> Iterator[Any]:
            if not value:
                return
            if of_attribute and not arguments:
                raise FilterArgumentError("Missing parameter for attribute name")
            read = _getter(sandbox, arguments[0] if of_attribute else None)
            check, *others = [*arguments[of_attribute:], None]
            passes = bool if check is None else sandbox.offered(sandbox.tests, "test", check)
            given = () if check is None else others[:-1]
            for item in items_of(sandbox, value):
                if bool(passes(read(item), *given, **named)) is keep:
                    yield item

        return lazy(sandbox.budget, chosen(), value)

    return run


LIST_FILTERS: dict[str, Callable[..., Any]] = {
    "batch": _batch,
    "dictsort": _dictsort,
    "first": _first,
    "groupby": _groupby,
    "items": _items,
    "join": _join,
    "last": _last,
    "list": _listed,
    "map": _map,
    "max": _extreme("max", max),
    "min": _extreme("min", min),
    "reject": _chooser(keep=False, of_attribute=False),
    "rejectattr": _chooser(keep=False, of_attribute=True),
    "reverse": _reverse,
    "select": _chooser(keep=True, of_attribute=False),
    "selectattr": _chooser(keep=True, of_attribute=True),
    "slice": _slice,
    "sort": _sort,
    "sum": _sum,
    "unique": _unique,
}
