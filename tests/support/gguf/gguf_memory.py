"""GGUF files that are already in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.formats.gguf.reader import no_other, read_source

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.formats.gguf.reader import GGUFFile


class MemorySource:
    """A Source of bytes that are already in memory."""

    def __init__(self, data: bytes) -> None:
        self._bytes = data
        self.size = len(data)

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._bytes[offset : offset + len(into)]

    def check_unchanged(self) -> None:
        """Do nothing because the bytes cannot change."""

    def check_in_place(self) -> None:
        """Do nothing because there is no path."""

    def close(self) -> None:
        """Do nothing because nothing is open."""


def read_gguf(data: bytes, path: Path) -> GGUFFile:
    """Open a single-file model from memory. `path` appears in error messages. Raises the errors of `open_gguf`."""
    return read_source(MemorySource(data), path, no_other)
