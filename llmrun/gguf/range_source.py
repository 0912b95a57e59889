"""A file that is somewhere else: a function fetches ranges of its bytes, over HTTP or otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.gguf.problems import shown

Fetch = Callable[[int, int], bytes]  # the bytes from the first number to before the second; may raise NetworkError


@dataclass(slots=True)
class RangeSource:
    """A Source of `size` bytes behind `fetch`. Each read is one fetch; reading a header from front to end asks for
    nothing twice."""

    fetch: Fetch
    size: int
    path: Path

    def read(self, offset: int, into: memoryview) -> None:
        """See Source.read. Raises what `fetch` raises too."""
        data = self.fetch(offset, offset + len(into))
        if len(data) != len(into):
            asked = f"bytes {offset} to {offset + len(into)} were asked for, {len(data)} came"
            raise ModelFileError(
                f"the model file cannot be read: {shown(str(self.path), 300)}: {asked}",
                hint="Try again: the server cut the answer off, or gives no parts of files.",
            )
        into[:] = data

    def check_unchanged(self) -> None:
        """Nobody can tell."""

    def check_in_place(self) -> None:
        """Nobody can tell."""

    def close(self) -> None:
        """There is nothing to let go of."""
