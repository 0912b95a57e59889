"""A file with the state of one sequence, such as a conversation or the prompt of a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import IntegrityError, LlmrunError
from llmrun.engine.saved_state.budget import Budget, may_overwrite, note_uses
from llmrun.engine.saved_state.state_file import StateFile
from llmrun.engine.slots import common_prefix

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache, SavedPart
    from llmrun.engine.requests import StatePlace


class SavedFile:
    """Saves prefixes in one file.

    place   the file, and the space for this and other files
    key     the KVCache.key of the model
    report  called with a sentence if the state cannot be used or saved
    """

    def __init__(self, place: StatePlace, key: str, report: Callable[[str], None]) -> None:
        self.place = place
        self.path = Path(place.path)
        self._key = key
        self._budget = Budget([*map(Path, place.folders)], place.limit) if place.folders else None
        self._report = report
        self._has_failed = False
        self._is_damaged = False

    def longest(self, tokens: list[int], tenant: str) -> int:
        try:
            return common_prefix(StateFile(self.path, self._key).tokens, tokens)
        except OSError as error:
            self._report(f"saved state cannot be read: {self.path}: {error.strerror}")
            return 0

    def load(self, kv: KVCache, seq: int, tokens: list[int], tenant: str) -> int:
        try:
            state = StateFile(self.path, self._key)
        except OSError as error:
            self._report(f"saved state cannot be read: {self.path}: {error.strerror}")
            return kv.truncate(seq, 0)
        n = common_prefix(state.tokens, tokens)
        needed = [part for part in state.parts if part.start < n]
        kept = kv.load(seq, [replace(part, read=partial(self._read, part)) for part in needed])
        note_uses([self.path])
        return kv.truncate(seq, min(n, kept))

    def save(self, kv: KVCache, seq: int, tokens: Sequence[int], n: int, tenant: str) -> bool:
        if self._has_failed:
            return False
        try:
            if self._is_damaged:
                self.path.unlink(missing_ok=True)
                self._is_damaged = False
            if not may_overwrite(self.path):  # for example, because of `llmrun ... > FILE`
                self._has_failed = True
                self._report(f"state is not saved: {self.path}: this file has other contents and is not overwritten")
                return False
            state = StateFile(self.path, self._key)
            parts = [part for part in kv.save(seq, n) if part.end <= len(tokens)]
            state.save(tokens, parts, self._has_room)
        except OSError as error:
            self._has_failed = True  # do not report the error again
            self._report(f"state is not saved: {self.path}: {error.strerror}")
        except LlmrunError as error:  # raised, for example, if llama.cpp has crashed
            self._has_failed = True
            self._report(f"state is not saved: {self.path}: {error}")
        return False

    def _read(self, part: SavedPart) -> memoryview | bytes | bytearray:
        """Read a part, and mark the file for replacement if the part is damaged."""
        try:
            return part.read()
        except IntegrityError as error:
            self._is_damaged = True
            self._report(f"{error}; the tokens from {part.start:,} on are computed again")
            raise

    def _has_room(self, added: int) -> bool:
        if self._budget is None or self._budget.make_room(self.path, added):
            return True
        self._has_failed = True
        self._report(f"state is not saved: it needs {added:,} bytes, more than state_gb or the free disk space allows")
        return False
