"""The interface through which a running benchmark reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class BenchReporter(Protocol):
    """Shows the progress and notes of a benchmark.

    note      show a message that stays visible
    progress  replace the current progress; `share` is the completed share of the work, 0 to 1
    watch     call `tell` repeatedly and show the progress that it returns, until the next `progress` or `watch`
    """

    def progress(self, words: str, share: float | None = None) -> None: ...

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None: ...

    def note(self, words: str) -> None: ...
