"""The interface through which a running benchmark reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class BenchReporter(Protocol):
    """Shows the progress and notes of a benchmark.

    note      show a message that stays
    progress  replace the current progress; `share` is the share of the work that is done, 0 to 1
    watch     call `tell` repeatedly for progress that changes with time, until the next `progress` or `watch`
    """

    def progress(self, words: str, share: float | None = None) -> None: ...

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None: ...

    def note(self, words: str) -> None: ...
