"""A source for remote files. It calls a function to fetch byte ranges, for example over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.errors import ModelFileError
from llmrun.formats.gguf.problems import shown

Fetch = Callable[[int, int], bytes]  # (start, end); the end is exclusive; may raise NetworkError


@dataclass(slots=True)
class RangeSource:
    """A Source of `size` bytes, which are read by calling `fetch`.

    Each read calls `fetch` once, and nothing is cached. Reading a header from start to end fetches each byte once.
    """

    fetch: Fetch
    size: int
    path: Path

    def read(self, offset: int, into: memoryview) -> None:
        """See Source.read. Also raises the same errors as `fetch`."""
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
