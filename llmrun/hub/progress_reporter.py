"""The interface through which the hub reports progress. The command line implements it with progress bars."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """A receiver of notes and progress from a long-running job."""

    def note(self, line: str) -> None:
        """Show one line of information, for example that a source did not respond."""

    def progress(self, label: str, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are complete.

        A new label starts a new bar. The bar ends when `done == total` or when `note` is called.
        """


class Silent:
    """A reporter that discards everything."""

    def note(self, line: str) -> None:
        del line

    def progress(self, label: str, done: int, total: int) -> None:
        del label, done, total
