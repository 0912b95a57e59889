"""The only place that runs a chat template: Jinja2's immutable sandbox, set up as `transformers` sets it up.

A template comes with the model file, so it is a stranger's program. The sandbox keeps it from reaching Python; the
limits here keep single operations small. What is refused is a TemplateRefused of one line, whatever was raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmrun.errors import TemplateRefused

LONGEST_SOURCE = 1 << 20  # characters; the longest real one has 17 thousand
LONGEST_OUTPUT = 1 << 24  # characters: some 4 million tokens
LONGEST_VALUE = 1 << 24  # characters or items one `+` or `*` may make
WIDEST_INTEGER = 4096  # bits
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")  # a `%` format that pads by itself, or by an argument


class _Refusal(Exception):  # named for what the template says, which is not an error of ours
    """`raise_exception` was called."""


def render(source: str, name: str, variables: Mapping[str, Any]) -> str:
    """The text a template makes. `name` says in errors which template it was. Raises TemplateRefused."""
    if len(source) > LONGEST_SOURCE:
        raise TemplateRefused(f"chat template is too long: {name}: {len(source)} characters, limit {LONGEST_SOURCE}")
    pieces: list[str] = []
    length = 0
    try:
        for piece in _compiled(source).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST_OUTPUT:
                raise SecurityError(f"the text it makes is longer than {LONGEST_OUTPUT} characters")
    except _Refusal as refusal:
        raise TemplateRefused(f"chat template refuses this conversation: {name}: {_one_line(refusal)}") from refusal
    except Exception as error:
        raise TemplateRefused(f"chat template failed: {name}: {_place(error)}{_one_line(error)}") from error
    return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model said, for training. Here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChatSandbox(ImmutableSandboxedEnvironment):
    """Operators that can make something huge in one go are looked at first."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _grows_too_large(operator, left, right):
            raise SecurityError(f"the operator {operator} would make a value that is too large")
        return super().call_binop(context, operator, left, right)


def _grows_too_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "**":
        return isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > WIDEST_INTEGER
    if operator == "*" and isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length() > WIDEST_INTEGER
    if operator == "*":
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        return isinstance(times, int) and hasattr(sequence, "__len__") and len(sequence) * times > LONGEST_VALUE
    if operator == "+":
        return isinstance(left, str | list | tuple) and len(left) + len(right) > LONGEST_VALUE
    return isinstance(left, str) and _WIDE_FIELD.search(left) is not None


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    # optimized=True would run filters on constants while compiling, before any limit holds.
    environment = _ChatSandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' filter writes it; Jinja2's own would escape `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100:
        raise SecurityError(f"strftime_now got a pattern of {len(pattern)} characters, limit 100")
    return datetime.now().strftime(pattern)


def _place(error: Exception) -> str:
    """ "line 7: ", when it is known: Jinja2 rewrites tracebacks to the template's own lines."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: " if line else ""


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
