"""The interface through which a batch tells the user how it is going."""

from __future__ import annotations

from typing import Protocol

from llmrun.jobs.batching.tally import Tally


class Reporter(Protocol):
    """Shows what a batch is doing."""

    def progress(self, tally: Tally) -> None:
        """Show the counts of a run. Called several times a second."""

    def waiting(self, words: str) -> None:
        """Show what the run is waiting for, such as "opening 10.0.0.7"."""

    def note(self, words: str) -> None:
        """Show a line that the user should read."""
