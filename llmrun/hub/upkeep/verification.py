"""Reading a model from end to end: are these the bytes that were promised, and are they numbers.

The sha256 is held against what the catalogue says, or the blob's own name, or what was recorded when it was fetched.
The header is read as if the model were opened, and the scales of every block are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmrun.errors import LlmrunError
from llmrun.gguf.problems import shown
from llmrun.gguf.reader import open_gguf
from llmrun.hub.local.model_records import remember_digests
from llmrun.hub.local.safe_writes import digest
from llmrun.hub.local.stored_models import expected_digest
from llmrun.hub.names.model_sources import Expected
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.upkeep.inventory import USERS, Model
from llmrun.quants.scales import unsound_blocks

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.gguf.tensors import TensorInfo

_CHUNK = 1 << 23  # bytes of a tensor looked at together, or a little less
_MOST_PROBLEMS = 20  # that are told of one model


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """What reading a model found.

    digests   of its files; "" for one that cannot be read
    expected  what they had to be; "" where nobody says
    tensors   how many were looked at
    problems  a line each: what is damaged
    missing   files that are not there
    unread    a line for each file that is there but does not let itself be read: nothing is known of its bytes
    """

    name: str
    digests: tuple[str, ...]
    expected: tuple[str, ...]
    tensors: int
    problems: tuple[str, ...]
    missing: tuple[Path, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not (self.problems or self.missing or self.unread)

    @property
    def has_other_bytes(self) -> bool:
        """Whether fetching it again would help."""
        return any(seen != wanted for seen, wanted in zip(self.digests, self.expected, strict=True) if seen and wanted)


def verify(model: Model, promised: Sequence[Expected], reporter: Reporter) -> VerificationResult:
    """Read all of it. What was seen is recorded, for good and for ill: the next start goes by it. Of USERS nothing is.

    promised  what the catalogue says of its files; () where it says nothing
    """
    known = promised if len(promised) == len(model.files) else (None,) * len(model.files)
    said = [expected_digest(path, one) for path, one in zip(model.files, known, strict=True)]
    recorded = {file.path: file.sha256 for file in model.record.files} if model.record else {}
    expected = tuple(one or recorded.get(str(path), "") for path, one in zip(model.files, said, strict=True))
    missing: list[Path] = []
    unread: list[str] = []
    digests = [_digest(path, model.name, reporter, missing, unread) for path in model.files]
    problems = [
        f"{path}: sha256 {seen}, must be {wanted}"
        for path, seen, wanted in zip(model.files, digests, expected, strict=True)
        if wanted and seen and seen != wanted
    ]
    # A file of the user's is theirs to change; elsewhere the record may be all that tells what the bytes had to be.
    if all(digests) and model.holder != USERS and (all(said) or not any(expected)):
        remember_digests(model.files, digests, name=model.name, source=str(model.source or model.path))
    tensors = 0
    if all(digests):
        tensors, unsound = _looked_at(model, reporter)
        problems += unsound
    return VerificationResult(
        model.name, tuple(digests), expected, tensors, tuple(problems), tuple(missing), tuple(unread)
    )


def _digest(path: Path, name: str, reporter: Reporter, missing: list[Path], unread: list[str]) -> str:
    try:
        return digest(path, reporter, f"{name}: bytes")
    except FileNotFoundError:
        missing.append(path)
    except OSError as error:
        unread.append(f"{path}: cannot be read: {error.strerror}")
    return ""


def _looked_at(model: Model, reporter: Reporter) -> tuple[int, list[str]]:
    """(number of tensors, what is wrong with the header or with them)"""
    problems: list[str] = []
    tensors = 0
    try:
        with open_gguf(model.path) as file:
            tensors = len(file.tensors)
            problems.extend(islice(_unsound_tensors(file, model.name, reporter), _MOST_PROBLEMS))
    except LlmrunError as error:
        problems.append(str(error))
    return tensors, problems


def _unsound_tensors(file: GGUFFile, name: str, reporter: Reporter) -> Iterator[str]:
    """A line for each tensor in which something is not a number. Raises ModelFileError."""
    done, total = 0, sum(tensor.nbytes for tensor in file.tensors.values())
    for tensor in file.tensors.values():
        count, first = 0, -1
        for start, unsound in _checked_blocks(file, tensor):
            done += len(unsound) * tensor.type.block_bytes
            reporter.progress(f"{name}: tensors", done, total)
            if unsound.any():
                first = first if count else start + int(np.argmax(unsound))
                count += int(unsound.sum())
        if count:
            what = "weights" if tensor.type.block_weights == 1 else f"blocks of {tensor.type.name}"
            of = tensor.nbytes // tensor.type.block_bytes
            yield f"{shown(tensor.name)}: {count:,} of {of:,} {what} hold a NaN or an infinity, the first is {first:,}"


def _checked_blocks(
    file: GGUFFile, tensor: TensorInfo
) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """(number of the first block, bool[n]: which of n blocks are unsound)"""
    size = tensor.type.block_bytes
    step = max(_CHUNK // size, 1) * size
    buffer = np.empty(min(step, tensor.nbytes), np.uint8)
    for start in range(0, tensor.nbytes, step):
        part = buffer[: min(step, tensor.nbytes - start)]
        file.read_into(tensor, start, part)
        yield start // size, unsound_blocks(tensor.type, part)
