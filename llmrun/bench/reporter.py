"""What a benchmark tells while it runs; the command line shows it."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """`progress` replaces what it said before; a note stays."""

    def progress(self, words: str) -> None: ...

    def note(self, words: str) -> None: ...
