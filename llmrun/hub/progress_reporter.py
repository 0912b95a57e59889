"""The interface for reporting the progress of downloads and checks, which the CLI implements with progress bars."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """A receiver of notes and progress reports from long-running jobs."""

    def note(self, line: str) -> None:
        """Show one line of information, for example that a source did not respond."""

    def progress(self, label: str, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are complete.

        A new label starts a new progress bar, which ends when `done == total` or at the next note.
        """


class Silent:
    """A reporter that discards everything."""

    def note(self, line: str) -> None:
        del line

    def progress(self, label: str, done: int, total: int) -> None:
        del label, done, total
