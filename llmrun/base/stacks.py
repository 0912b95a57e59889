"""Calls functions on larger stacks, for libraries whose recursion depth grows with the size of the input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

USUAL_STACK = 8 << 20  # bytes; the usual stack size of a main thread
_PAGE = 1 << 16  # bytes; a multiple of the page size on every machine


def on_stack(n_bytes: int, work: Callable[[], T]) -> T:
    """Call a function on a new thread with a stack of this size, and return the result. Exceptions propagate.

    If the system refuses the size, the stack is smaller, but has at least 8 MiB. Only the used part of the stack takes
    up memory. Concurrent calls are not safe because the stack size is a process-wide setting.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    _started(run, n_bytes).join()
    if errors:
        raise errors[0]
    return results[0]


def _started(run: Callable[[], None], size: int) -> threading.Thread:
    while True:
        before = threading.stack_size(-(-size // _PAGE) * _PAGE)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            return thread
        except RuntimeError:  # The system refused a stack of this size.
            if size <= USUAL_STACK:
                raise
            size = max(size // 2, USUAL_STACK)
        finally:
            threading.stack_size(before)
