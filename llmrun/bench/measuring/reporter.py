"""What a benchmark tells while it runs; the command line shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class BenchReporter(Protocol):
    """A note stays; `progress` replaces what it said before, and `share` of the work, 0 to 1, is done then.

    `watch` asks for the words and the share again and again, until the next call of either: for what changes with time.
    """

    def progress(self, words: str, share: float | None = None) -> None: ...

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None: ...

    def note(self, words: str) -> None: ...
