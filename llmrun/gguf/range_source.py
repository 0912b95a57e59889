"""A file that is somewhere else: a function fetches ranges of its bytes, over HTTP or otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmrun.errors import ModelFileError
from llmrun.gguf.problems import shown

Fetch = Callable[[int, int], bytes]  # the bytes from the first number to before the second; may raise NetworkError


@dataclass(slots=True)
class RangeSource:
    """A Source of `size` bytes behind `fetch`. Each read is one fetch, and counted; nothing is asked for twice by who
    reads a header from front to end.

    bytes_read  so far
    n_fetches   so far
    """

    fetch: Fetch
    size: int
    path: Path
    bytes_read: int = field(default=0, init=False)
    n_fetches: int = field(default=0, init=False)

    def read(self, offset: int, into: NDArray[np.uint8]) -> None:
        """See Source.read. Raises what `fetch` raises too."""
        data = self.fetch(offset, offset + len(into))
        self.n_fetches += 1
        self.bytes_read += len(data)
        if len(data) != len(into):
            asked = f"bytes {offset} to {offset + len(into)} were asked for, {len(data)} came"
            raise ModelFileError(
                f"the model file cannot be read: {shown(str(self.path), 300)}: {asked}",
                hint="Try again: the server cut the answer off, or gives no parts of files.",
            )
        into[:] = np.frombuffer(data, np.uint8)

    def check_unchanged(self) -> None:
        """Nobody can tell."""

    def check_in_place(self) -> None:
        """Nobody can tell."""

    def close(self) -> None:
        """There is nothing to let go of."""
