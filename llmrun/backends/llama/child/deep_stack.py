"""Calls a function with a larger stack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_USUAL = 8 << 20  # bytes; the usual stack size of a main thread
_MOST = 1 << 30
_PAGE = 1 << 16  # bytes; a multiple of the page size on every machine


def call_with_stack(n_bytes: int, function: Callable[[], Result]) -> Result:
    """Call a function on a new thread whose stack is `n_bytes` larger than usual. Exceptions propagate to the caller.

    The stack is at most 1 GiB, or less if the system refuses that size. Only the part that is used takes up memory.
    This is not safe for concurrent callers because the stack size is a process-wide setting.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - The caller raises it again.
            errors.append(error)

    _start_thread(call, min(_USUAL + n_bytes, _MOST)).join()
    if errors:
        raise errors[0]
    return results[0]


def _start_thread(call: Callable[[], None], stack: int) -> threading.Thread:
    while True:
        before = threading.stack_size(-(-stack // _PAGE) * _PAGE)
        try:
            thread = threading.Thread(target=call)
            thread.start()
            return thread
        except RuntimeError:  # The system refused a stack of this size.
            if stack <= _USUAL:
                raise
            stack = max(stack // 2, _USUAL)
        finally:
            threading.stack_size(before)
