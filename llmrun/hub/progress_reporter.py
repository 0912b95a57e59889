"""How the hub tells the user what it is doing. The command line supplies one that draws; `Silent` says nothing."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """What a long job says while it runs."""

    def note(self, line: str) -> None:
        """One line worth reading, such as a source that did not answer."""

    def progress(self, label: str, done: int, total: int) -> None:
        """`done` of `total` bytes. A new label starts a new bar; `done == total` ends it, and so does `note`."""


class Silent:
    """A reporter for code that has nobody to talk to."""

    def note(self, line: str) -> None:
        del line

    def progress(self, label: str, done: int, total: int) -> None:
        del label, done, total
