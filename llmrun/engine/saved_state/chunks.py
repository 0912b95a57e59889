"""A folder with saved prefixes of many sequences, in chunks of 512 tokens that the sequences share.

A chunk is a file whose name is a hash of its tenant, its tokens and all tokens before them. Sequences with the same
beginning therefore have their first chunks in common, and a saved prefix is found by looking for the files of its
chunks. Tokens after the last whole chunk are not saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.backends.base import SavedPart
from llmrun.base.errors import IntegrityError
from llmrun.engine.saved_state.budget import ENDING, Budget, note_use
from llmrun.engine.saved_state.state_file import TOKEN, StateFile

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache

CHUNK: Final = 512  # tokens


class SavedChunks:
    """Saves prefixes in the files of a folder. Tenants never share chunks.

    key     the KVCache.key of the model
    report  called with a sentence if the state cannot be used or saved
    """

    def __init__(self, folder: Path, key: str, budget: Budget, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._key = key
        self._budget = budget
        self._report = report
        self._has_failed = False
        # Maps the last chunk of a saved prefix to the number of tokens that the cache kept, which can be smaller than
        # the number of saved tokens, because a window or a recurrent state is missing.
        self._kept: dict[Path, int] = {}

    def longest(self, tokens: list[int], tenant: str) -> int:
        found = self._found(tokens, tenant)
        return self._kept.get(found[-1], CHUNK * len(found)) if found else 0

    def load(self, kv: KVCache, seq: int, tokens: list[int], tenant: str) -> int:
        found = self._found(tokens, tenant)
        parts: list[SavedPart] = []
        damaged: set[Path] = set()
        for index, path in enumerate(found):
            first = index * CHUNK
            for part in self._parts_of(path, tokens[first : first + CHUNK], damaged):
                read = partial(_read, part, path, damaged)
                parts.append(replace(part, start=first + part.start, end=first + part.end, read=read))
        kept = kv.load(seq, parts)
        self._kept[found[-1]] = kept
        for path in reversed(found):  # mark the first chunk last, because later chunks are useless without it
            note_use(path)
        for path in damaged:
            self._report(f"saved prefix is damaged and was removed: {path}")
            with contextlib.suppress(OSError):  # the file belongs to another user, or was just removed
                path.unlink()
        return kept

    def save(self, kv: KVCache, seq: int, tokens: Sequence[int], n: int, tenant: str) -> bool:
        """Save the first chunk of a sequence that is not in the folder yet."""
        paths = list(self._paths(tokens[:n], tenant))
        missing = [(index, path) for index, path in enumerate(paths) if not path.exists()]
        if not missing or self._has_failed:
            return False
        index, path = missing[0]
        first, end = index * CHUNK, (index + 1) * CHUNK
        parts = [
            replace(part, start=part.start - first, end=part.end - first)
            for part in kv.save(seq, len(paths) * CHUNK)
            if first < part.end <= end
        ]
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = StateFile(path, self._key)
            if state.save(tokens[first:end], parts, partial(self._budget.make_room, path)):
                self._kept.clear()  # more of the sequences that contain this chunk may be usable now
                return len(missing) > 1
            self._report("prefixes are not saved: another chunk exceeds state_gb or the free disk space")
        except OSError as error:
            self._report(f"prefixes are not saved: {path}: {error.strerror}")
        self._has_failed = True  # do not report the error again
        return False

    def _parts_of(self, path: Path, tokens: list[int], damaged: set[Path]) -> list[SavedPart]:
        """Return the parts of a chunk. If the file cannot be used, return no parts and add the file to `damaged`."""
        try:
            state = StateFile(path, self._key)
        except OSError as error:
            self._report(f"saved prefix cannot be read: {path}: {error.strerror}")
            return []
        if state.tokens == tokens:
            return state.parts
        damaged.add(path)
        return []

    def _found(self, tokens: Sequence[int], tenant: str) -> list[Path]:
        """Return the chunks of the longest saved prefix of these tokens."""
        return list(itertools.takewhile(Path.exists, self._paths(tokens, tenant)))

    def _paths(self, tokens: Sequence[int], tenant: str) -> Iterator[Path]:
        """Yield the path of each whole chunk of these tokens."""
        hashed = hashlib.sha256(f"{self._key} {tenant}".encode())
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            hashed.update(np.array(tokens[end - CHUNK : end], TOKEN).tobytes())
            yield self._folder / f"{hashed.hexdigest()[:40]}{ENDING}"


def _read(part: SavedPart, path: Path, damaged: set[Path]) -> memoryview | bytes | bytearray:
    """Read a part of a chunk, and add the chunk to `damaged` if reading fails."""
    try:
        return part.read()
    except IntegrityError:
        damaged.add(path)
        raise
