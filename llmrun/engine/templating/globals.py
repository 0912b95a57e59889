"""The functions every template knows: Jinja2's without `lipsum`, and those `transformers` adds."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2.exceptions import SecurityError
from jinja2.utils import Cycler, Namespace

from llmrun.engine.templating.budget import OverBudget
from llmrun.engine.templating.values import Function, iterable, key, text_of

if TYPE_CHECKING:
    from llmrun.engine.templating.environment import ChatSandbox

LONGEST_RANGE = 100_000  # as Jinja2's own sandbox has it
LONGEST_PATTERN = 100  # characters
_PATTERN = re.compile(r"(?:[^%]|%[-_0^#EO:]?[A-Za-z%])*")  # no widths: glibc pads to any number


class ConversationRefused(Exception):  # named for what the template says, which is not an error of ours
    """`raise_exception` was called."""


def _range(sandbox: ChatSandbox, *bounds: int) -> range:
    numbers = range(*bounds)
    sandbox.budget.spend(20)
    if len(numbers) > LONGEST_RANGE:
        raise OverBudget(f"a range of {len(numbers):,} numbers, limit {LONGEST_RANGE:,}")
    return numbers


def _dict(sandbox: ChatSandbox, /, *source: Any, **named: Any) -> dict[Any, Any]:
    [items] = source or ({},)
    if isinstance(items, dict):
        sandbox.budget.allow(100 * len(items), "dict")
        made = {**items}
    else:
        made = {}
        for name, value in iterable(items):
            sandbox.budget.spend(12)
            made[key(name)] = value
    made.update(named)
    return sandbox.budget.keep(made)


def _namespace(sandbox: ChatSandbox, /, *source: Any, **named: Any) -> Namespace:
    sandbox.budget.spend(40)  # some 300 bytes
    space = Namespace()
    # Given to Namespace() it would be copied, and the copy go uncounted.
    object.__setattr__(space, "_Namespace__attrs", _dict(sandbox, *source, **named))
    return space


def _cycler(sandbox: ChatSandbox, *items: Any) -> Cycler:
    sandbox.budget.spend(20)
    return Cycler(*items)


def _joiner(sandbox: ChatSandbox, sep: str = ", ") -> Function:
    sandbox.budget.spend(20)
    parts = iter(("",))
    return Function(lambda _sandbox: next(parts, sep))


def _raise_exception(sandbox: ChatSandbox, message: object) -> NoReturn:
    raise ConversationRefused(text_of(message, sandbox.budget))


def _strftime_now(_sandbox: ChatSandbox, pattern: str) -> str:
    if len(pattern) > LONGEST_PATTERN:
        raise SecurityError(f"strftime_now got a pattern of {len(pattern)} characters, limit {LONGEST_PATTERN}")
    if not _PATTERN.fullmatch(pattern):
        raise SecurityError(f"strftime_now got a pattern that is not supported: {pattern!r}")
    return datetime.now().strftime(pattern)


GLOBALS = {
    "cycler": Function(_cycler),
    "dict": Function(_dict),
    "joiner": Function(_joiner),
    "namespace": Function(_namespace),
    "raise_exception": Function(_raise_exception),
    "range": Function(_range),
    "strftime_now": Function(_strftime_now),
}
