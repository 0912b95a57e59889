"""The sandbox a compiled template runs in: every attribute, item, call, operator and output of it comes here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from llmrun.engine.templating.budget import DEEPEST_CALL, Budget, OverBudget
from llmrun.engine.templating.checks import CHECKS
from llmrun.engine.templating.globals import GLOBALS
from llmrun.engine.templating.list_filters import LIST_FILTERS
from llmrun.engine.templating.methods import METHODS, PROPERTIES
from llmrun.engine.templating.operators import (
    calculate,
    compare,
    compare_all,
    concatenate,
    join_texts,
    negate,
    slice_of,
)
from llmrun.engine.templating.rewriting import Inner
from llmrun.engine.templating.source import GenerationTag, TokenGuard
from llmrun.engine.templating.text_filters import TEXT_FILTERS
from llmrun.engine.templating.values import SCALARS, Function, Method, hashable, iterable, key, text_of

_NEVER_USED = Budget(0, 0, 0.0)  # of the environment that only compiles
_MOST_SPREAD = 100  # arguments `*list` or `**dict` may give a call: a macro can keep them all
_LONGEST_NAME = 100  # characters of what was not found that an error repeats


class ChatSandbox(ImmutableSandboxedEnvironment):
    """One compiles all templates; each rendering has its own (`for_rendering`) with its budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    intercepted_unops = frozenset(("+", "-"))
    budget: Budget = _NEVER_USED

    def __init__(self) -> None:
        # optimized=True would run filters on constants while compiling; so would output that needs no context.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationTag, TokenGuard, loopcontrols],
            finalize=_finalize,
        )
        self.globals = {**GLOBALS}
        self.filters = dict[str, Any](_FILTERS)
        self.tests = dict[str, Any](CHECKS)

    def for_rendering(self, budget: Budget) -> ChatSandbox:
        """An environment that shares everything but the account, and what is bound to it."""
        other = object.__new__(ChatSandbox)
        other.__dict__.update(self.__dict__)
        other.budget = budget
        other.filters = _BoundTable(_FILTERS, other)
        other.tests = _BoundTable(CHECKS, other)
        other.concat = other._concatenate_output  # type: ignore[method-assign]
        return other

    def close(self) -> None:
        """After the rendering. Much here refers to itself: values would stay until the garbage is collected."""
        self.budget.close()
        self.__dict__.clear()

    def offered(self, table: dict[str, Any], kind: str, name: Any) -> Callable[..., Any]:
        """A filter or test that the template names in a string."""
        if isinstance(name, str) and not name.startswith(Inner.MARK) and name in table:
            return table[name]  # type: ignore[no-any-return]
        raise TemplateRuntimeError(f"No {kind} named {str(name)[:_LONGEST_NAME]!r}.")

    # --- called by the code Jinja2 makes

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        methods = METHODS.get(kind)
        if methods is not None and attribute in methods:
            return Method(methods[attribute], obj)
        if kind is dict:
            if hasattr(dict, attribute):
                return self.unsafe_undefined(obj, attribute)
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind is Undefined:
            return obj._fail_with_undefined_error()
        if attribute.startswith("_"):
            return self.unsafe_undefined(obj, attribute)
        if attribute in PROPERTIES.get(kind, ()) or kind is Namespace:
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        if hasattr(kind, attribute):
            return self.unsafe_undefined(obj, attribute)
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        kind = type(obj)
        if kind is Undefined:
            return obj._fail_with_undefined_error()
        if METHODS.get(kind) is not None and kind is not LoopContext:
            try:
                return obj[argument if type(argument) in SCALARS else hashable(argument, self.budget)]
            except (TypeError, LookupError):
                pass
        if not isinstance(argument, str):
            name = argument if type(argument) in SCALARS else type(argument).__name__
            return self.undefined(obj=obj, name=name)
        if kind is dict and argument not in METHODS[dict]:
            if hasattr(dict, argument):
                return self.unsafe_undefined(obj, argument)
            return self.undefined(obj=obj, name=argument[:_LONGEST_NAME])
        return self.getattr(obj, argument if len(argument) <= _LONGEST_NAME else argument[:_LONGEST_NAME])

    def call(self, context: Context, callee: Any, /, *arguments: Any, **named: Any) -> Any:
        kind = type(callee)
        if kind is Method or kind is Function:
            named.pop("_loop_vars", None)
            named.pop("_block_vars", None)
            if kind is Method:
                return callee.function(self, callee.owner, *arguments, **named)
            return callee.function(self, *arguments, **named)
        if kind is Macro:
            return self._call_deeper(context, callee, arguments, named)
        if kind is LoopContext and len(arguments) == 1:
            return self._call_deeper(context, callee, (_Paid(self.budget, iterable(arguments[0]), 1),), named)
        if kind is Undefined:
            return callee()
        raise SecurityError(f"a {kind.__name__} cannot be called")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return calculate(self.budget, operator, left, right)

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        return negate(operator, arg)

    def _call_deeper(self, context: Context, callee: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        budget = self.budget
        if budget.depth >= DEEPEST_CALL:
            raise OverBudget(f"macros call each other more than {DEEPEST_CALL} deep")
        budget.spend(40)
        budget.depth += 1
        try:
            return context.call(callee, *arguments, **named)
        finally:
            budget.depth -= 1

    def _concatenate_output(self, texts: Iterable[str]) -> str:
        return join_texts(self.budget, "", [*texts], "a block")


@pass_context
def _finalize(context: Context, value: Any) -> str:
    sandbox: ChatSandbox = context.environment  # type: ignore[assignment]
    return text_of(value, sandbox.budget)


class _BoundTable(dict[str, Any]):
    """Functions that take the sandbox first, bound to it when they are first asked for."""

    def __init__(self, table: dict[str, Callable[..., Any]], sandbox: ChatSandbox) -> None:
        self._table = table
        self._sandbox = sandbox

    def __missing__(self, name: str) -> Any:
        self[name] = bound = partial(self._table[name], self._sandbox)
        return bound

    def __contains__(self, name: object) -> bool:
        return name in self._table


class _Paid:
    """What a loop goes through: each item costs what the body costs. Has a length when the items have one."""

    __slots__ = ("_budget", "_items", "_steps")

    def __init__(self, budget: Budget, items: Iterable[Any], steps: int) -> None:
        self._budget = budget
        self._items = items
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        budget, steps = self._budget, self._steps
        for item in self._items:
            budget.spend(steps)
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def _loop(sandbox: ChatSandbox, value: Any, steps: int) -> _Paid:
    return _Paid(sandbox.budget, iterable(value), steps)


def _pay(sandbox: ChatSandbox, steps: int) -> None:
    sandbox.budget.spend(steps)


def _literal(sandbox: ChatSandbox, value: Any) -> Any:
    return sandbox.budget.keep(value)


def _dict_literal(sandbox: ChatSandbox, pairs: tuple[tuple[Any, Any], ...]) -> dict[Any, Any]:
    return sandbox.budget.keep({key(name): value for name, value in pairs})


def _spread(sandbox: ChatSandbox, value: Any) -> list[Any]:
    arguments = []
    for item in iterable(value):
        sandbox.budget.spend(8)
        arguments.append(item)
        if len(arguments) > _MOST_SPREAD:
            raise OverBudget(f"a call with more than {_MOST_SPREAD} arguments from a list")
    return arguments


def _spread_named(sandbox: ChatSandbox, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MOST_SPREAD:
        raise OverBudget(f"a call takes names from a dict, and {_MOST_SPREAD} at most")
    sandbox.budget.spend(20 * len(value))
    return value


_FILTERS: dict[str, Callable[..., Any]] = {
    **TEXT_FILTERS,
    **LIST_FILTERS,
    Inner.LOOP: _loop,
    Inner.PAY: _pay,
    Inner.LITERAL: _literal,
    Inner.DICT: _dict_literal,
    Inner.SPREAD: _spread,
    Inner.SPREAD_NAMED: _spread_named,
    Inner.CONCATENATE: concatenate,
    Inner.COMPARE: compare,
    Inner.COMPARE_ALL: compare_all,
    Inner.SLICE: slice_of,
}
