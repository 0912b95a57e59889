"""Sequences of the CPU engine or a scripted model that are saved in files, for tests of saved states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmrun.backends.base import Backend
from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.types import LOGITS, Batch
from llmrun.engine.requests import StatePlace
from llmrun.engine.saved_state.one_file import SavedFile


def grow(backend: Backend, seq: int, start: int, tokens: Sequence[int]) -> np.typing.NDArray[np.float32]:
    """Run the tokens after the first `start` of a sequence, and return the logits of the last one."""
    new = np.array(tokens[start:], np.int32)
    want = np.zeros(len(new), np.uint8)
    want[-1] = LOGITS
    positions = np.arange(start, len(tokens), dtype=np.int32)
    return backend.forward(Batch(new, np.full(len(new), seq, np.int32), positions, want)).logits


def saved_file(path: Path, backend: Backend, notes: list[str] | None = None) -> SavedFile:
    """Return a saved file without a budget. Problems are appended to `notes`; without it, they fail the test."""

    def fail(words: str) -> None:
        raise AssertionError(words)

    return SavedFile(StatePlace(str(path)), backend.kv.key, fail if notes is None else notes.append)


def loaded(path: Path, tokens: Sequence[int]) -> list[int]:
    """Load the tokens of a scripted model that are saved in a file, and return them."""
    backend = ScriptedBackend(context_size=4096)
    saved_file(path, backend, []).load(backend.kv, 0, list(tokens), "")
    return backend.kv.sequences[0]
