"""The filters that make text or numbers: Jinja2's own behind a look at the sizes, and transformers' `tojson`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinja2.filters import FILTERS
from jinja2.runtime import Undefined
from markupsafe import Markup, escape

from llmrun.engine.templating.budget import OverBudget
from llmrun.engine.templating.formatting import check_percent_format
from llmrun.engine.templating.methods import METHODS, check_width, replace
from llmrun.engine.templating.operators import calculate
from llmrun.engine.templating.values import LONGEST_NUMBER, bytes_of, check_integer, measure, text_of

if TYPE_CHECKING:
    from llmrun.engine.templating.environment import ChatSandbox

_WIDEST_INDENT = 1_000  # characters
_MOST_DIGITS = 30  # `round` would compute 10 to that power
_METHODS = METHODS[str]


def soft_text(sandbox: ChatSandbox, value: Any) -> str:
    """The value as text; what is text already, Markup too, stays as it is."""
    return value if isinstance(value, str) else text_of(value, sandbox.budget)


def _only_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} takes text, not a {type(value).__name__}")
    return value


def _through(name: str) -> Callable[..., Any]:
    """A filter that is a method of strings."""
    method = _METHODS[name]

    def run(sandbox: ChatSandbox, value: Any, *arguments: Any) -> Any:
        return method(sandbox, soft_text(sandbox, value), *arguments)

    return run


def _center(sandbox: ChatSandbox, value: Any, width: int = 80) -> Any:
    return _METHODS["center"](sandbox, soft_text(sandbox, value), width)


def _trim(sandbox: ChatSandbox, value: Any, chars: str | None = None) -> Any:
    return _METHODS["strip"](sandbox, soft_text(sandbox, value), chars)


def _replace(sandbox: ChatSandbox, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    budget = sandbox.budget
    whole, found, instead = (text_of(value, budget) for value in (s, old, new))
    return replace(sandbox, whole, found, instead, -1 if count is None else count)


def _by_words(name: str) -> Callable[..., Any]:
    """`title` and `wordcount`: every word becomes a string of its own on the way."""
    jinjas = FILTERS[name]

    def run(sandbox: ChatSandbox, value: Any) -> Any:
        text = soft_text(sandbox, value)
        sandbox.budget.spend(2 * len(text))
        sandbox.budget.allow(40 * len(text), name)
        return sandbox.budget.keep(jinjas(text))

    return run


def _indent(sandbox: ChatSandbox, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    text = _only_text(s, "indent")
    indention = width if isinstance(width, str) else ""
    if not isinstance(width, str):
        check_width(sandbox, "indent", width, text)
    lines = len(_METHODS["splitlines"](sandbox, text)) + 1
    each = bytes_of(indention) if isinstance(width, str) else max(width, 0)
    wide = 1 if text.isascii() and indention.isascii() else 4
    escaped = 6 if isinstance(s, Markup) else 1
    sandbox.budget.allow((bytes_of(text) + lines * (each + 1) * escaped) * wide, "indent")
    return sandbox.budget.keep(FILTERS["indent"](text, width, first, blank))


def _truncate(
    sandbox: ChatSandbox,
    s: Any,
    length: int = 255,
    killwords: bool = False,
    end: str = "...",
    leeway: int | None = None,
) -> Any:
    if isinstance(s, str):
        sandbox.budget.allow(bytes_of(s) + 6 * bytes_of(_only_text(end, "truncate")), "truncate")
    return sandbox.budget.keep(FILTERS["truncate"](sandbox, s, length, killwords, end, leeway))


def _format(sandbox: ChatSandbox, value: Any, /, *values: Any, **named: Any) -> Any:
    template = soft_text(sandbox, value)
    sandbox.budget.allow(check_percent_format(sandbox.budget, template, named or values), "format")
    return sandbox.budget.keep(FILTERS["format"](template, *values, **named))


def _escape(sandbox: ChatSandbox, value: Any) -> Any:
    text = soft_text(sandbox, value)
    sandbox.budget.allow(5 * bytes_of(text), "escape")
    return sandbox.budget.keep(escape(text))


def _safe(sandbox: ChatSandbox, value: Any) -> Any:
    return sandbox.budget.keep(Markup(soft_text(sandbox, value)))


def _abs(_sandbox: ChatSandbox, value: Any) -> Any:
    return check_integer(abs(value))


def _int(_sandbox: ChatSandbox, value: Any, default: int = 0, base: int = 10) -> Any:
    if isinstance(value, str) and len(value) > LONGEST_NUMBER:
        return default
    return check_integer(FILTERS["int"](value, default, base))


def _float(_sandbox: ChatSandbox, value: Any, default: float = 0.0) -> Any:
    if isinstance(value, str) and len(value) > LONGEST_NUMBER:
        return default
    return FILTERS["float"](value, default)


def _round(sandbox: ChatSandbox, value: Any, precision: int = 0, method: str = "common") -> Any:
    if isinstance(precision, int) and abs(precision) > _MOST_DIGITS:
        raise OverBudget(f"round to {precision:,} digits, limit {_MOST_DIGITS}")
    if isinstance(value, str):
        return calculate(sandbox.budget, "-", value, 0)  # fails as Python does
    return check_integer(FILTERS["round"](value, precision, method))


def _length(sandbox: ChatSandbox, value: Any) -> int:
    return len(value)


def to_json(
    sandbox: ChatSandbox,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' filter writes it; Jinja2's own would escape `<`, `>`, `&` and `'` for HTML."""
    budget = sandbox.budget
    budget.spend(40)
    size = measure(value, budget)
    step = 0 if indent is None else bytes_of(indent) if isinstance(indent, str) else max(indent, 0)
    around = 8 + step * (size.depth - 1) + sum(bytes_of(text) for text in separators or () if isinstance(text, str))
    budget.spend(6 * size.nodes)
    if indent is not None:
        budget.spend(size.nodes * (20 + size.depth))  # Python's encoder, a generator for every level
    if sort_keys:
        budget.spend(size.nodes * size.nodes.bit_length() + (size.characters >> 4) * size.nodes.bit_length())
    longest_escape = 12 if ensure_ascii else 6
    if step > _WIDEST_INDENT:  # it is made for a number too, and stays until the garbage is collected
        raise OverBudget(f"tojson(indent={step}) is wider than {_WIDEST_INDENT} characters")
    budget.allow(size.bytes(longest_escape, around), "tojson")
    return budget.keep(
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


def _default(_sandbox: ChatSandbox, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    return default_value if isinstance(value, Undefined) or (boolean and not value) else value


TEXT_FILTERS: dict[str, Callable[..., Any]] = {
    "abs": _abs,
    "capitalize": _through("capitalize"),
    "center": _center,
    "count": _length,
    "d": _default,
    "default": _default,
    "e": _escape,
    "escape": _escape,
    "float": _float,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "length": _length,
    "lower": _through("lower"),
    "replace": _replace,
    "round": _round,
    "safe": _safe,
    "string": soft_text,
    "title": _by_words("title"),
    "tojson": to_json,
    "trim": _trim,
    "truncate": _truncate,
    "upper": _through("upper"),
    "wordcount": _by_words("wordcount"),
}
