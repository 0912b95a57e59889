"""Parts of the KV cache that can be saved in a file and loaded again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

BLOCK_PART: Final = "block"
CHECKPOINT_PART: Final = "checkpoint"
SEQUENCE_PART: Final = "sequence"


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part of what a backend stores for a sequence.

    kind      BLOCK_PART: keys and values of the positions from `start` to `end`. CHECKPOINT_PART: the recurrent state
              after the first `end` positions, with `start` equal to `end`. SEQUENCE_PART: everything about the first
              `end` positions
    contents  a number that describes the contents to the backend
    n_bytes   the size of the data
    read      returns the data. For a part that is loaded from a file, it raises IntegrityError if the data is damaged
    """

    kind: str
    start: int
    end: int
    contents: int
    n_bytes: int
    read: Callable[[], memoryview | bytes | bytearray]


def identity_of(file: GGUFFile) -> list[str | int]:
    """Return what identifies a model in a key: its sampled digest, and when its file was last modified.

    The samples may miss a change of a few weights, but such a change does not leave the time as it was.
    """
    from llmrun.formats.gguf.sampled_digest import sampled_digest

    return [sampled_digest(file), file.path.stat().st_mtime_ns]


def key_of(decisive: dict[str, Any]) -> str:
    """Return the sha256, in hexadecimal, of everything that determines the meaning and the values of saved parts."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
