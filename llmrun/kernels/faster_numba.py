"""Numba compiles the same code in two thirds of the time. For the compiler's process alone.

Most of a kernel's second is Numba's own Python, not LLVM. 16 kernels of one level in one process, in turns on two
cores, 6 runs of each: 4.2 s of processor time as Numba comes (3.9 to 4.9), 2.7 s (2.6 to 3.3) when the types of an
operator are looked up once and variables are listed without a call for each name and number. The garbage collector is
no part of it: 4.2 s without (3 runs). The objects are the same to the byte.
"""

from __future__ import annotations

from typing import Any

from numba.core import ir
from numba.core.types.functions import BaseFunction

# What instructions hold beside variables: no variable is in them.
_LEAVES = frozenset({str, int, float, bool, type(None), ir.Loc})


def make_faster() -> None:
    """Change Numba in this process."""
    BaseFunction.get_call_type = _remembering(BaseFunction.get_call_type)  # type: ignore[method-assign]
    ir.Inst._rec_list_vars = _list_vars


def _remembering(resolve: Any) -> Any:
    """`get_call_type` of a built-in function: the same types give the same signature, which is kept beside them."""

    def get_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        known = function.__dict__.setdefault("llmrun_known", {})
        key = (context, tuple(args), tuple(kws.items()))
        if key not in known:
            known[key] = resolve(function, context, args, kws)
        return known[key]

    return get_call_type


def _list_vars(instruction: Any, value: Any) -> list[Any]:
    """The variables in `value`, in order, as `Inst._rec_list_vars` finds them."""
    if isinstance(value, ir.Var):
        return [value]
    if isinstance(value, ir.Inst):
        return value.list_vars()  # type: ignore[no-any-return]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    found = []
    for part in value:
        if type(part) is ir.Var:
            found.append(part)
        elif type(part) not in _LEAVES:
            found += instruction._rec_list_vars(part)
    return found
