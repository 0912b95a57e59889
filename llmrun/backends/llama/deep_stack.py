"""A call with as much stack as it asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_USUAL = 8 << 20  # bytes: what a main thread has
_MOST = 1 << 30
_PAGE = 1 << 16  # of any machine, or a multiple of it


def call_with_stack(n_bytes: int, function: Callable[[], Result]) -> Result:
    """`function()`, on a thread with n bytes of stack beyond the usual; what it raises is raised here.

    At most 1 GiB, and less where the system does not give as much. Only what is used takes memory. Not for two callers
    at a time: the size is a setting of the whole process.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    _started(call, min(_USUAL + n_bytes, _MOST)).join()
    if errors:
        raise errors[0]
    return results[0]


def _started(call: Callable[[], None], stack: int) -> threading.Thread:
    while True:
        before = threading.stack_size(-(-stack // _PAGE) * _PAGE)
        try:
            thread = threading.Thread(target=call)
            thread.start()
            return thread
        except RuntimeError:  # no room for such a stack
            if stack <= _USUAL:
                raise
            stack = max(stack // 2, _USUAL)
        finally:
            threading.stack_size(before)
