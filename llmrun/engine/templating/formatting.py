"""`"%5d" % number` and `"{:>5}".format(number)`: how long the result can be, before it is made."""

from __future__ import annotations

import re
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import SecurityError
from markupsafe import Markup, escape

from llmrun.engine.templating.budget import OverBudget
from llmrun.engine.templating.values import SCALARS, before_writing, bytes_of, measure, text_of

if TYPE_CHECKING:
    from llmrun.engine.templating.budget import Budget
    from llmrun.engine.templating.environment import ChatSandbox

WIDEST_FIELD = 999  # characters a field may be padded to, or digits it may have
_NUMBER = 400  # characters of the longest number without padding: 1e308 with a %f
_PERCENT = re.compile(
    r"""%
    (?:\((?P<key>[^()]*)\))?
    [-+\x20#0]*
    (?P<width>\d*)
    (?:\.(?P<precision>\d*))?
    [hlL]?
    (?P<kind>[diouxXeEfFgGcrsa%])""",
    re.VERBOSE,
)
_LONG_NUMBER = re.compile(r"\d{4}")


def check_percent_format(budget: Budget, template: str, values: Any) -> int:
    """At most so many bytes `template % values` has.

    A field this function does not understand, or whose width is an argument, is refused: what Python makes of it is
    not known.
    """
    length = len(template)
    wide = not template.isascii()
    escaped = 6 if isinstance(template, Markup) else 1
    position = 0
    used: dict[str | None, int] = {}
    budget.scan(length)
    while (position := template.find("%", position)) >= 0:
        budget.spend(20)
        field = _PERCENT.match(template, position)
        if field is None:
            raise OverBudget(f"a % format has a field that is not supported: {template[position : position + 20]!r}")
        width, precision = (int(field[name] or 0) for name in ("width", "precision"))
        if max(width, precision) > WIDEST_FIELD:
            raise OverBudget(f"a % format pads to {max(width, precision):,} characters, limit {WIDEST_FIELD:,}")
        budget.spend((width + precision) >> 2)  # 999 digits take 23 us
        length += width + precision + _NUMBER
        if field["kind"] in "rsa":
            used[field["key"]] = used.get(field["key"], 0) + 1
        position = field.end()
    for key, times in used.items():
        value = values.get(key) if key is not None and isinstance(values, dict) else values
        size = measure(value, budget)
        # Fields without a key take one value after the other: all of them together are `values`, once.
        length += size.bytes(10 if size.wide else 4) * (times if key is not None else 1)
        wide = wide or size.wide
    return length * (4 if wide else 1) * escaped


def format_braces(sandbox: ChatSandbox, template: str, values: Sequence[Any], named: Mapping[str, Any]) -> str:
    """`template.format(*values, **named)`."""
    sandbox.budget.spend(80)  # Python's formatter is written in Python
    formatter = _BoundedFormatter(sandbox, isinstance(template, Markup))
    text = formatter.vformat(str(template), values, named)
    return sandbox.budget.keep(Markup(text) if isinstance(template, Markup) else text)


class _BoundedFormatter(Formatter):
    """Python's own, field by field: attributes and items through the sandbox, text and padding from the budget."""

    def __init__(self, sandbox: ChatSandbox, escaping: bool) -> None:
        self._sandbox = sandbox
        self._budget = sandbox.budget
        self._escaping = escaping
        self._made = 0

    def parse(self, format_string: str) -> Iterable[Any]:
        for field in super().parse(format_string):
            self._count(field[0])
            yield field

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first, rest = formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            self._budget.spend(10)
            value = self._sandbox.getattr(value, name) if is_attribute else self._sandbox.getitem(value, name)
        return value, first

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "s":
            return text_of(value, self._budget)
        if conversion is not None:
            self._allow_text(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec:
            text = text_of(value, self._budget)
        elif _LONG_NUMBER.search(format_spec):
            raise OverBudget(f"a format pads to more than {WIDEST_FIELD:,} characters: {format_spec[:20]!r}")
        elif type(value) in SCALARS:
            text = super().format_field(value, format_spec)
            self._budget.spend(len(text) >> 2)
        else:
            raise SecurityError(f"a {type(value).__name__} cannot be padded")
        if self._escaping and not isinstance(value, Markup):
            text = str(escape(text))
        self._count(text)
        return text

    def _allow_text(self, value: Any) -> None:
        before_writing(measure(value, self._budget), self._budget, "a format")

    def _count(self, text: str) -> None:
        self._made += bytes_of(text)
        self._budget.spend(30)
        self._budget.allow(self._made, "a format")
