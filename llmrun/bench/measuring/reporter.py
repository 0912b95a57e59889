"""What a benchmark tells while it runs; the command line shows it."""

from __future__ import annotations

from typing import Protocol


class BenchReporter(Protocol):
    """A note stays; `progress` replaces what it said before, and `share` of the work, 0 to 1, is done then."""

    def progress(self, words: str, share: float | None = None) -> None: ...

    def note(self, words: str) -> None: ...
