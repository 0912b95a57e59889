"""A folder with saved prefixes of many sequences, in chunks of 512 tokens that the sequences share.

A chunk is a file whose name contains two hashes: one of the tenant and all tokens before the chunk, and one that also
includes the chunk's own tokens. Sequences with the same beginning therefore have their first chunks in common. The last
chunk of a sequence may be shorter. A longer chunk replaces it when the sequence has grown.

If a prompt differs from all saved sequences within a chunk, the tokens before the difference are loaded from this
chunk. Without them, an agent's second session would compute 256 tokens on average, which takes 3 seconds at a depth of
16,384 (docs/kv-cache.md).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.backends.base import SavedPart
from llmrun.base.errors import IntegrityError
from llmrun.engine.saved_state.budget import ENDING, Budget, note_uses
from llmrun.engine.saved_state.state_file import TOKEN, StateFile
from llmrun.engine.slots import common_prefix

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache

CHUNK: Final = 512  # tokens
_LEAST_TOKENS: Final = 32  # a shorter last chunk is not worth a file
_HASH_LETTERS: Final = 32


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tokens of a sequence from `first` to `end`. `name` is the file with all or more of these tokens."""

    first: int
    end: int
    name: str


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
        self._is_full = False  # True after a report that there is no room
        # Maps the last chunk of a saved prefix to the number of tokens that the cache kept, which can be smaller than
        # the number of saved tokens, because a window or a recurrent state is missing.
        self._kept: dict[_Chunk, int] = {}
        self._tokens: dict[str, list[int]] = {}  # the tokens of files by name; files do not change

    def longest(self, tokens: list[int], tenant: str) -> int:
        found = self._found(tokens, tenant)
        return self._kept.get(found[-1], found[-1].end) if found else 0

    def load(self, kv: KVCache, seq: int, tokens: list[int], tenant: str) -> int:
        found = self._found(tokens, tenant)
        if not found:  # another process has just removed the files
            return kv.truncate(seq, 0)
        parts: list[SavedPart] = []
        damaged: set[Path] = set()
        for chunk in found:
            path = self._folder / chunk.name
            for part in self._parts_of(path, tokens[chunk.first : chunk.end], damaged):
                start, end = chunk.first + part.start, chunk.first + part.end
                parts.append(replace(part, start=start, end=end, read=partial(_read, part, path, damaged)))
        kept = kv.truncate(seq, min(kv.load(seq, parts), found[-1].end))
        self._kept[found[-1]] = kept
        note_uses([self._folder / chunk.name for chunk in found])
        for path in damaged:
            self._tokens.pop(path.name, None)
            self._report(f"saved prefix is damaged and was removed: {path}")
            with contextlib.suppress(OSError):  # the file belongs to another user, or was just removed
                path.unlink()
        return kept

    def save(self, kv: KVCache, seq: int, tokens: Sequence[int], n: int, tenant: str) -> bool:
        """Save the first chunk of a sequence that is not in the folder yet."""
        if self._has_failed:
            return False
        names, earlier = self._names(), list[Path]()
        for chunk in self._chunks(tokens[:n], tenant):
            name = chunk.name
            if name not in names:
                own = list(tokens[chunk.first : chunk.end])
                parts = _parts_within(kv.save(seq, n), chunk)
                covering = self._covering(chunk, own, parts, names)
                if not covering:
                    is_written = self._write(chunk, own, parts, earlier)
                    note_uses([*earlier, self._folder / name])
                    return is_written and chunk.end < n
                name = covering
            earlier.append(self._folder / name)
        note_uses(earlier)
        return False

    def _write(self, chunk: _Chunk, tokens: list[int], parts: Sequence[SavedPart], earlier: Sequence[Path]) -> bool:
        """Write a chunk, and remove the chunks that it replaces. Returns whether the chunk was saved.

        earlier  the files with the tokens before this chunk, without which the chunk would be useless
        """
        path = self._folder / chunk.name
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = StateFile(path, self._key)
            if not state.save(tokens, parts, partial(self._budget.make_room, path, kept=earlier)):
                if not self._is_full:
                    self._report("prefixes are not saved: another chunk exceeds state_gb or the free disk space")
                self._is_full = True
                return False
        except OSError as error:
            self._report(f"prefixes are not saved: {path}: {error.strerror}")
            self._has_failed = True  # do not report the error again
            return False
        self._is_full = False
        self._kept.clear()  # more of the sequences that contain this chunk may be usable now
        self._remove_shorter(chunk)
        return True

    def _remove_shorter(self, chunk: _Chunk) -> None:
        """Remove the chunks whose tokens and parts are all in this chunk."""
        with contextlib.suppress(OSError):  # another process has removed a file, or still reads it
            whole = StateFile(self._folder / chunk.name, self._key)
            for name in _following(chunk, self._names() - {chunk.name}):
                shorter = StateFile(self._folder / name, self._key)
                if len(shorter.tokens) < len(whole.tokens) and not whole.lacking(shorter.tokens, shorter.parts):
                    shorter.path.unlink()

    def _covering(self, chunk: _Chunk, tokens: list[int], parts: Sequence[SavedPart], names: Collection[str]) -> str:
        """Return the name of a longer chunk that contains these parts of a sequence's last chunk, or ""."""
        for name in _following(chunk, names) if chunk.end - chunk.first < CHUNK else ():
            if common_prefix(self._tokens_of(name), tokens) == len(tokens):
                with contextlib.suppress(OSError):  # another process has removed the file
                    if not StateFile(self._folder / name, self._key).lacking(tokens, parts):
                        return name
        return ""

    def _parts_of(self, path: Path, tokens: list[int], damaged: set[Path]) -> list[SavedPart]:
        """Return the parts of a chunk with the given tokens at its beginning.

        If the file cannot be used, returns no parts and adds the file to `damaged`.
        """
        try:
            state = StateFile(path, self._key)
        except OSError as error:
            self._report(f"saved prefix cannot be read: {path}: {error.strerror}")
            return []
        if state.tokens[: len(tokens)] == tokens:
            return [part for part in state.parts if part.start < len(tokens) or part.end <= len(tokens)]
        damaged.add(path)
        return []

    def _found(self, tokens: Sequence[int], tenant: str) -> list[_Chunk]:
        """Return the chunks of the longest saved prefix of these tokens, the last of which may be used in part."""
        names, found = self._names(), list[_Chunk]()
        for chunk in self._chunks(tokens, tenant):
            if chunk.name in names and chunk.end - chunk.first == CHUNK:
                found.append(chunk)
                continue
            own = list(tokens[chunk.first : chunk.end])
            shared = {name: common_prefix(self._tokens_of(name), own) for name in _following(chunk, names)}
            if shared and (most := max(shared.values())):
                name = next(name for name, n in shared.items() if n == most)
                found.append(_Chunk(chunk.first, chunk.first + most, name))
            break
        return found

    def _names(self) -> set[str]:
        try:
            names = {path.name for path in self._folder.iterdir()}
        except OSError:  # the folder does not exist yet
            names = set[str]()
        for removed in {*[*self._tokens]} - names:  # a copy, because another thread may add names
            self._tokens.pop(removed, None)
        return names

    def _tokens_of(self, name: str) -> list[int]:
        """Return the tokens of a file, or no tokens if the file cannot be read."""
        if (tokens := self._tokens.get(name)) is None:
            with contextlib.suppress(OSError):  # `load` reports problems with files that are used
                tokens = self._tokens[name] = StateFile(self._folder / name, self._key).tokens
        return tokens or []

    def _chunks(self, tokens: Sequence[int], tenant: str) -> Iterator[_Chunk]:
        """Yield the chunks of a sequence. The last one may be shorter than the others."""
        hashed = hashlib.sha256(f"{self._key} {tenant}".encode())
        for first in range(0, len(tokens) - _LEAST_TOKENS + 1, CHUNK):
            before = hashed.hexdigest()[:_HASH_LETTERS]
            own = np.array(tokens[first : first + CHUNK], TOKEN)
            hashed.update(own.tobytes())
            yield _Chunk(first, first + len(own), f"{before}-{hashed.hexdigest()[:_HASH_LETTERS]}{ENDING}")


def _following(chunk: _Chunk, names: Collection[str]) -> list[str]:
    """Return the names of all chunks that follow the same tokens as a chunk."""
    before = chunk.name[: _HASH_LETTERS + 1]
    return sorted(name for name in names if name.startswith(before))


def _parts_within(parts: Sequence[SavedPart], chunk: _Chunk) -> list[SavedPart]:
    """Return the parts in a chunk, with positions relative to the chunk."""
    return [
        replace(part, start=part.start - chunk.first, end=part.end - chunk.first)
        for part in parts
        if chunk.first < part.end <= chunk.end
    ]


def _read(part: SavedPart, path: Path, damaged: set[Path]) -> memoryview | bytes | bytearray:
    """Read a part of a chunk, and add the chunk to `damaged` if reading fails."""
    try:
        return part.read()
    except IntegrityError:
        damaged.add(path)
        raise
