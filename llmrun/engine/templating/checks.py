"""The tests a template can ask (`x is string`): all of Jinja2's, those that compute something behind our operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinja2.runtime import LoopContext, Macro
from jinja2.tests import TESTS

from llmrun.engine.templating.operators import calculate, compare
from llmrun.engine.templating.values import Function, Method, text_of

if TYPE_CHECKING:
    from llmrun.engine.templating.environment import ChatSandbox

# They look at the type or the identity of a value, and at nothing in it.
_BY_TYPE = (
    "boolean defined escaped false float integer iterable mapping none number sameas sequence string true undefined"
)


def _jinjas(name: str) -> Callable[..., Any]:
    check: Any = TESTS[name]

    def run(_sandbox: ChatSandbox, value: Any, *others: Any) -> Any:
        return check(value, *others)

    return run


def _compared(order: str) -> Callable[..., Any]:
    def run(sandbox: ChatSandbox, value: Any, other: Any) -> Any:
        return compare(sandbox, value, order, other)

    return run


def _remainder(sandbox: ChatSandbox, value: Any, divisor: Any) -> Any:
    return calculate(sandbox.budget, "%", value, divisor)  # of a text it would be a format


def _case(name: str) -> Callable[..., Any]:
    def run(sandbox: ChatSandbox, value: Any) -> bool:
        text = text_of(value, sandbox.budget)
        sandbox.budget.scan(len(text))
        return bool(getattr(text, name)())

    return run


CHECKS: dict[str, Callable[..., Any]] = {
    **{name: _jinjas(name) for name in _BY_TYPE.split()},
    **{name: _compared("eq") for name in ("==", "eq", "equalto")},
    **{name: _compared("ne") for name in ("!=", "ne")},
    **{name: _compared("gt") for name in (">", "gt", "greaterthan")},
    **{name: _compared("gteq") for name in (">=", "ge")},
    **{name: _compared("lt") for name in ("<", "lt", "lessthan")},
    **{name: _compared("lteq") for name in ("<=", "le")},
    "callable": lambda _sandbox, value: isinstance(value, Function | Method | Macro | LoopContext),
    "divisibleby": lambda sandbox, value, num: _remainder(sandbox, value, num) == 0,
    "even": lambda sandbox, value: _remainder(sandbox, value, 2) == 0,
    "filter": lambda sandbox, value: isinstance(value, str) and value in sandbox.filters,
    "in": _compared("in"),
    "lower": _case("islower"),
    "odd": lambda sandbox, value: _remainder(sandbox, value, 2) == 1,
    "test": lambda sandbox, value: isinstance(value, str) and value in sandbox.tests,
    "upper": _case("isupper"),
}
