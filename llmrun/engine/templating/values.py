"""What a template can hold: JSON's values, what Jinja2 makes for it, and a few things of ours. Nothing else gets in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Namespace
from markupsafe import Markup

from llmrun.engine.templating.budget import OverBudget

if TYPE_CHECKING:
    from llmrun.engine.templating.budget import Budget

SCALARS = frozenset((str, Markup, int, float, bool, type(None)))
VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SEQUENCES: tuple[type[Any], ...] = (list, tuple, *VIEWS)
WIDEST_INTEGER = 128  # bits; what is computed is small enough not to be counted
DEEPEST_VALUE = 200  # lists in lists; hashing a tuple of a hundred thousand levels would end the process
LONGEST_NUMBER = 1000  # characters `int` and `float` read; longer ones are no numbers


class Group(NamedTuple):
    """What `groupby` makes."""

    grouper: Any
    list: list[Any]

    def __repr__(self) -> str:
        return tuple.__repr__(self)  # as Jinja2 shows it


class Method:
    """A method of a value, as `text.strip` is before it is called."""

    __slots__ = ("function", "owner")

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        self.function = function  # called with the sandbox, the owner and what the template gives
        self.owner = owner

    def __repr__(self) -> str:
        return f"<method of {type(self.owner).__name__}>"  # no address: an answer must be repeatable


class Function:
    """A function every template knows, as `range`."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function  # called with the sandbox and what the template gives

    def __repr__(self) -> str:
        return "<function>"


class Lazy:
    """Items that are made when they are asked for, as `map` and `select` give them. Can be gone through once."""

    __slots__ = ("_depth", "_items")

    def __init__(self, items: Iterator[Any], source: Any) -> None:
        self._items = items
        self._depth: int = source._depth + 1 if isinstance(source, Lazy) else 1
        if self._depth > 20:  # freeing nested generators takes C stack
            raise OverBudget("more than 20 filters wait for each other's items")

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def __repr__(self) -> str:
        return "<generator object>"

    def __sizeof__(self) -> int:
        return 800  # with its generator, and what that holds


def lazy(budget: Budget, items: Iterator[Any], source: Any) -> Lazy:
    """Items that come from those of `source`, and are paid for by whoever makes them."""
    budget.spend(80)  # many of them at once keep the garbage collector busy: 8 us each
    return budget.keep(Lazy(items, source))


class Size(NamedTuple):
    """How large a value is when it is written out, each part as often as it would be written.

    nodes       values, the items of containers counted
    characters  of all strings, and of numbers
    depth       levels of containers
    wide        some string is not ASCII: a character may take 4 bytes
    """

    nodes: int
    characters: int
    depth: int
    wide: bool

    def bytes(self, longest_escape: int = 1, around: int = 8) -> int:
        """At most so many when every character becomes `longest_escape` and every value brings `around` more."""
        return (self.characters * longest_escape + self.nodes * around) * (4 if self.wide else 1)


def measure(value: Any, budget: Budget | None, most_nodes: int = 1_000_000) -> Size:
    """Walks a value level by level; pays for the walk, and for one more through all of its text by C code."""
    nodes = characters = depth = 0
    wide = False
    level: list[Any] = [value]
    while level:
        depth += 1
        if depth > DEEPEST_VALUE:
            raise OverBudget(f"a value is nested more than {DEEPEST_VALUE} deep")
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if isinstance(item, str):
                characters += len(item)
                wide = wide or not item.isascii()
            elif kind is dict:
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, _SEQUENCES):
                below.extend(item)
            elif kind is Namespace:
                below.extend(item._Namespace__attrs.values())
            elif isinstance(item, int):
                characters += item.bit_length() // 3 + 6
            else:
                characters += 24 if kind is float or item is None else 300
            if len(below) > most_nodes:
                raise OverBudget(f"a value of more than {most_nodes:,} items, each as often as it is used")
        nodes += len(level)
        if budget is not None:
            budget.spend(2 * len(level))
        level = below
    if budget is not None:
        budget.scan(characters)
    return Size(nodes, characters, depth, wide)


def before_writing(size: Size, budget: Budget, what: str) -> None:
    """Pays for the text Python makes of a value: `str`, or `repr` with its escapes. A float takes 0.6 us."""
    budget.spend(6 * size.nodes)
    budget.allow(size.bytes(10 if size.wide else 4), what)


def text_of(value: Any, budget: Budget) -> str:
    """What `{{ value }}` writes."""
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    if isinstance(value, str):
        budget.scan(len(value))
        return budget.keep(str(value))  # Markup is copied
    if kind in SCALARS or isinstance(value, int | float | Undefined | Lazy | Method | Function | Macro | LoopContext):
        return str(value)
    if isinstance(value, (dict, range, Namespace, *_SEQUENCES)):
        size = measure(value, budget)
        before_writing(size, budget, "writing out a value")
        return budget.keep(str(value))
    raise SecurityError(f"a template cannot write out a {type(value).__name__}")


def hashable(value: Any, budget: Budget) -> Any:
    """The value, once it is sure that hashing it is no deep recursion: for looking it up."""
    if type(value) not in SCALARS:
        measure(value, budget)
    return value


def key(value: Any) -> Any:
    """The value, once it is sure that it can be put into a dict or set: hashes that are not equal by design.

    Those of text are salted. Of others a hundred thousand equal ones are easily found (multiples of 2**61 - 1, tuples
    of -1 and -2), and a dict of them takes a minute.
    """
    kind = type(value)
    if isinstance(value, list | dict):
        raise TypeError(f"unhashable type: {kind.__name__!r}")
    if kind not in SCALARS and kind is not Undefined:
        raise OverBudget(f"a {kind.__name__} as a key")
    if isinstance(value, int) and value.bit_length() > 60:
        raise OverBudget("an integer of more than 60 bits as a key")
    return value


def bytes_of(text: str) -> int:
    """At most so many a text takes, and a few for itself."""
    return len(text) if text.isascii() else 4 * len(text)


def iterable(value: Any) -> Any:
    """The value when a template may go through its items; the error Python has for it when not."""
    if isinstance(value, (dict, str, range, Lazy, Undefined, *_SEQUENCES)):
        return value
    raise TypeError(f"{type(value).__name__!r} object is not iterable")


def check_integer(value: Any) -> Any:
    """A number that was computed."""
    if isinstance(value, int) and value.bit_length() > WIDEST_INTEGER:
        raise OverBudget(f"an integer of {value.bit_length():,} bits, limit {WIDEST_INTEGER}")
    return value
