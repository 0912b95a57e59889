"""A source for remote files, which calls a function to fetch ranges of bytes, over HTTP or otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.gguf.problems import shown

Fetch = Callable[[int, int], bytes]  # (start, end), with the end excluded; may raise NetworkError


@dataclass(slots=True)
class RangeSource:
    """A Source of `size` bytes that come from `fetch`.

    Each read is one fetch. Reading a header from start to end fetches every byte once.
    """

    fetch: Fetch
    size: int
    path: Path

    def read(self, offset: int, into: memoryview) -> None:
        """See Source.read. Also raises the errors of `fetch`."""
        data = self.fetch(offset, offset + len(into))
        if len(data) != len(into):
            asked = f"bytes {offset} to {offset + len(into)} were requested, but only {len(data)} bytes arrived"
            raise ModelFileError(
                f"the model file cannot be read: {shown(str(self.path), 300)}: {asked}",
                hint="Try again. The connection may have broken, or the server may not support range requests.",
            )
        into[:] = data

    def check_unchanged(self) -> None:
        """Do nothing because changes to a remote file cannot be detected here."""

    def check_in_place(self) -> None:
        """Do nothing because changes to a remote file cannot be detected here."""

    def close(self) -> None:
        """Do nothing because nothing is open."""
