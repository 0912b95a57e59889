"""The methods that values have in a template, by type: all that read, none that change a value in place.

Each looks at the sizes first where the result can be larger than what it is made from, or the work more than linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Cycler
from markupsafe import Markup

from llmrun.engine.templating.formatting import format_braces
from llmrun.engine.templating.operators import before_comparing, before_finding, join_texts, search_steps
from llmrun.engine.templating.values import VIEWS, Group, bytes_of, hashable, iterable

if TYPE_CHECKING:
    from llmrun.engine.templating.environment import ChatSandbox

Implementation = Callable[..., Any]

_SHORT = 10_000  # characters: what is made from so few is no concern
_SPACES = "".join(map(chr, range(0x2000, 0x200B))) + (
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def _plain(name: str) -> Implementation:
    """A method of strings that gives a flag, or no more characters than there were."""
    method = getattr(str, name)
    markup_method = getattr(Markup, name)

    def run(sandbox: ChatSandbox, text: str, /, *arguments: Any, **named: Any) -> Any:
        if len(text) > _SHORT:
            sandbox.budget.scan(len(text))
        result = (markup_method if type(text) is Markup else method)(text, *arguments, **named)
        return result if result is text else sandbox.budget.keep(result)

    return run


def _case(name: str) -> Implementation:
    """A method that may turn one character into three, by way of 12 bytes for each."""
    run = _plain(name)

    def run_case(sandbox: ChatSandbox, text: str) -> Any:
        if len(text) > _SHORT and not text.isascii():
            sandbox.budget.allow(12 * len(text), name)
            sandbox.budget.spend(len(text) >> 4)
        return run(sandbox, text)

    return run_case


def _strip(name: str) -> Implementation:
    run = _plain(name)

    def run_strip(sandbox: ChatSandbox, text: str, characters: str | None = None) -> Any:
        if characters is not None and len(characters) > 4:
            sandbox.budget.spend(len(text) * len(characters) >> 6)
        return run(sandbox, text, characters)

    return run_strip


def _affix(name: str) -> Implementation:
    """startswith and endswith: an affix, or a tuple of them."""
    run = _plain(name)

    def run_affix(sandbox: ChatSandbox, text: str, affix: Any, *bounds: int) -> Any:
        if isinstance(affix, tuple):
            sandbox.budget.spend(len(affix) * (1 + (len(text) >> 8)))
        return run(sandbox, text, affix, *bounds)

    return run_affix


def _search(name: str) -> Implementation:
    run = _plain(name)

    def run_search(sandbox: ChatSandbox, text: str, sought: str, *bounds: int) -> Any:
        _before_searching(sandbox, text, sought, backwards=name.startswith("r"))
        return run(sandbox, text, sought, *bounds)

    return run_search


def _before_searching(sandbox: ChatSandbox, text: str, sought: Any, *, backwards: bool) -> None:
    if not isinstance(sought, str):
        return
    if backwards and len(sought) > 1:  # Python's search from the end is quadratic
        sandbox.budget.spend(len(text) * min(len(sought), len(text)) >> 9)
    elif len(text) > 500:
        sandbox.budget.spend(search_steps(len(text), len(sought)))


def _split(name: str) -> Implementation:
    def run_split(sandbox: ChatSandbox, text: str, sep: str | None = None, maxsplit: int = -1) -> Any:
        if len(text) > _SHORT or (sep is not None and len(sep) > 1):
            _before_searching(sandbox, text, sep, backwards=name == "rsplit")
        if len(text) > _SHORT:
            cuts = sum(map(text.count, _SPACES)) if sep is None else text.count(sep) if sep else 0
            if 0 <= maxsplit < cuts:
                cuts = maxsplit
            sandbox.budget.allow(bytes_of(text) + 80 * cuts, name)
        return sandbox.budget.keep_all(getattr(text, name)(sep, maxsplit))

    return run_split


def _split_lines(sandbox: ChatSandbox, text: str, keepends: bool = False) -> Any:
    if len(text) > _SHORT:
        sandbox.budget.allow(bytes_of(text) + 80 * sum(map(text.count, _LINE_ENDS)), "splitlines")
    return sandbox.budget.keep_all(text.splitlines(keepends))


def _partition(name: str) -> Implementation:
    def run_partition(sandbox: ChatSandbox, text: str, sep: str) -> Any:
        _before_searching(sandbox, text, sep, backwards=name == "rpartition")
        return tuple(sandbox.budget.keep_all([*getattr(text, name)(sep)]))

    return run_partition


def _pad(name: str) -> Implementation:
    def run_pad(sandbox: ChatSandbox, text: str, width: int, *fill: str) -> Any:
        check_width(sandbox, name, width, text, *fill)
        return sandbox.budget.keep(getattr(text, name)(width, *fill))

    return run_pad


def check_width(sandbox: ChatSandbox, name: str, width: Any, *texts: Any) -> None:
    """Before texts are made wider: `center(400000000)`."""
    if isinstance(width, int):
        narrow = all(isinstance(text, str) and text.isascii() for text in texts)
        sandbox.budget.allow(width if narrow else 4 * width, f"{name}({width})")


def _expand_tabs(sandbox: ChatSandbox, text: str, tabsize: int = 8) -> Any:
    sandbox.budget.scan(len(text))
    sandbox.budget.allow(bytes_of(text) + 4 * text.count("\t") * max(tabsize, 0), f"expandtabs({tabsize})")
    return sandbox.budget.keep(text.expandtabs(tabsize))


def replace(sandbox: ChatSandbox, text: str, old: str, new: str, count: int = -1) -> Any:
    """`text.replace(old, new, count)`."""
    if not (isinstance(old, str) and isinstance(new, str)):
        raise TypeError("replace takes two strings")
    _before_searching(sandbox, text, old, backwards=False)
    if len(text) * (1 + len(new)) > _SHORT:
        found = text.count(old)
        found = min(found, count) if count >= 0 else found
        sandbox.budget.spend(found >> 1)
        escaped = 6 if isinstance(text, Markup) else 1
        wide = 1 if text.isascii() and new.isascii() else 4
        sandbox.budget.allow(wide * (len(text) + found * max(len(new) * escaped - len(old), 0)), "replace")
    return sandbox.budget.keep(text.replace(old, new, count))


def _join(sandbox: ChatSandbox, text: str, items: Any) -> Any:
    texts = list(iterable(items))
    sandbox.budget.spend(len(texts) >> 1)
    for item in texts:
        if not isinstance(item, str):
            raise TypeError(f"join takes strings, not a {type(item).__name__}")
    if isinstance(text, Markup):
        sandbox.budget.allow(6 * (bytes_of(text) * len(texts) + sum(map(bytes_of, texts))), "join")
        return sandbox.budget.keep(text.join(texts))
    return join_texts(sandbox.budget, text, texts, "join")


def _format(sandbox: ChatSandbox, text: str, /, *values: Any, **named: Any) -> Any:
    return format_braces(sandbox, text, values, named)


def _format_map(sandbox: ChatSandbox, text: str, named: Any) -> Any:
    if not isinstance(named, dict):
        raise TypeError("format_map takes a dict")
    return format_braces(sandbox, text, (), named)


def _get(sandbox: ChatSandbox, owner: dict[Any, Any], key: Any, default: Any = None) -> Any:
    return owner.get(hashable(key, sandbox.budget), default)


def _copy(sandbox: ChatSandbox, owner: Any) -> Any:
    sandbox.budget.allow(100 * len(owner) if isinstance(owner, dict) else 8 * len(owner), "copy")
    return sandbox.budget.keep(owner.copy())


def _index(sandbox: ChatSandbox, owner: Any, item: Any, *bounds: int) -> Any:
    before_finding(sandbox.budget, owner, item)
    return owner.index(item, *bounds)


def _count_items(sandbox: ChatSandbox, owner: Any, item: Any) -> Any:
    before_finding(sandbox.budget, owner, item)
    return owner.count(item)


def _changed(sandbox: ChatSandbox, loop: LoopContext, *values: Any) -> Any:
    before_comparing(sandbox.budget, loop._last_changed_value, values)
    return loop.changed(*values)


def _simple(name: str) -> Implementation:
    """A method that costs no more than the call."""

    def run(_sandbox: ChatSandbox, owner: Any, *arguments: Any) -> Any:
        return getattr(owner, name)(*arguments)

    return run


_FLAGS = "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper"
_TEXT: dict[str, Implementation] = {
    **{name: _plain(name) for name in [*_FLAGS.split(), "removeprefix", "removesuffix"]},
    **{name: _case(name) for name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper")},
    **{name: _strip(name) for name in ("lstrip", "rstrip", "strip")},
    **{name: _affix(name) for name in ("startswith", "endswith")},
    **{name: _search(name) for name in ("count", "find", "index", "rfind", "rindex")},
    **{name: _split(name) for name in ("split", "rsplit")},
    **{name: _partition(name) for name in ("partition", "rpartition")},
    **{name: _pad(name) for name in ("center", "ljust", "rjust", "zfill")},
    "expandtabs": _expand_tabs,
    "format": _format,
    "format_map": _format_map,
    "join": _join,
    "replace": replace,
    "splitlines": _split_lines,
}
_NO_METHODS: dict[str, Implementation] = {}
METHODS: dict[type, dict[str, Implementation]] = {
    str: _TEXT,
    Markup: _TEXT,
    dict: {"get": _get, "copy": _copy, **{name: _simple(name) for name in ("items", "keys", "values")}},
    list: {"copy": _copy, "count": _count_items, "index": _index},
    tuple: {"count": _count_items, "index": _index},
    Group: {"count": _count_items, "index": _index},
    float: {"is_integer": _simple("is_integer")},
    LoopContext: {"changed": _changed, "cycle": _simple("cycle")},
    Cycler: {"next": _simple("next"), "reset": _simple("reset")},
    **dict.fromkeys((int, bool, range, type(None), *VIEWS), _NO_METHODS),
}
# What can be read from a value without a call.
PROPERTIES: dict[type, frozenset[str]] = {
    Group: frozenset(("grouper", "list")),
    LoopContext: frozenset(
        (
            "depth",
            "depth0",
            "first",
            "index",
            "index0",
            "last",
            "length",
            "nextitem",
            "previtem",
            "revindex",
            "revindex0",
        )
    ),
    Macro: frozenset(("arguments", "caller", "catch_kwargs", "catch_varargs", "name")),
    Cycler: frozenset(("current",)),
}
