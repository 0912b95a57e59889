"""Verifies that a model's sha256 matches, its header is valid and its weights are finite, and likewise its projector's.

The expected sha256 comes from the catalogue, the blob's name or the record of the download. The header is checked as
strictly as when the model is opened, and the scales of every block are checked for NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.base.errors import LlmrunError, shown
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.quants.registry import unsound_blocks
from llmrun.hub.local.model_records import ModelRecord, read_record, remember_digests
from llmrun.hub.local.projectors import projectors_of
from llmrun.hub.local.safe_writes import digest
from llmrun.hub.local.stored_models import expected_digest
from llmrun.hub.names import Expected
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.upkeep.inventory import OWN, USERS, Model

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo

_CHUNK = 1 << 23  # bytes to check at a time, rounded down to whole blocks
_MOST_PROBLEMS = 20  # the maximum number of tensors to report per model


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The result of verifying a model.

    digests   the sha256 of each file, the model's files first; "" if the file could not be read
    expected  the expected sha256 of each file; "" if unknown
    tensors   the number of tensors that were checked
    problems  a message for each damaged file or tensor
    missing   files that do not exist
    unread    a message for each file that exists but could not be read
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
        """True if a file has the wrong sha256, so that downloading the model again may help."""
        return any(seen != wanted for seen, wanted in zip(self.digests, self.expected, strict=True) if seen and wanted)


def verify(model: Model, promised: Sequence[Expected], reporter: Reporter) -> VerificationResult:
    """Verify all files of a model and its projector, and record their digests, even if these are not the expected ones.

    The digests are recorded so that the next run does not have to hash the files again. Digests of files that the user
    gave as paths (USERS) or linked to are not recorded.

    promised  the model's files according to the catalogue; () if the catalogue does not contain them
    """
    # Users may change their own files at any time. For other files, a record that is the only source of an expected
    # digest must not be overwritten.
    is_users = model.holder == USERS or (model.holder == OWN and model.path.is_symlink())
    parts = [_Files(model.files, promised if len(promised) == len(model.files) else (), model.record)]
    parts += [_Files((path,), (), read_record(path)) for path in projectors_of(model.path)]
    digests: list[str] = []
    expected: list[str] = []
    missing: list[Path] = []
    unread: list[str] = []
    for part in parts:
        said = part.said()
        recorded = {} if part.record is None or is_users else {file.path: file.sha256 for file in part.record.files}
        wanted = [one or recorded.get(str(path), "") for path, one in zip(part.files, said, strict=True)]
        seen = [_digest(path, model.name, reporter, missing, unread) for path in part.files]
        if all(seen) and not is_users and (all(said) or not any(wanted)):
            remember_digests(part.files, seen, name=model.name, source=str(model.source or model.path))
        digests += seen
        expected += wanted
    files = [path for part in parts for path in part.files]
    problems = [
        f"{path}: sha256 is {seen}, expected {wanted}"
        for path, seen, wanted in zip(files, digests, expected, strict=True)
        if wanted and seen and seen != wanted
    ]
    tensors = 0
    for first in (part.files[0] for part in parts if all(digests)):
        checked, unsound = _check_tensors(first, model.name, reporter)
        tensors += checked
        problems += unsound
    return VerificationResult(
        name=model.name,
        digests=tuple(digests),
        expected=tuple(expected),
        tensors=tensors,
        problems=tuple(problems),
        missing=tuple(missing),
        unread=tuple(unread),
    )


class _Files(NamedTuple):
    """The files of a model or its projector, with their digests in the catalogue, or (), and their record."""

    files: tuple[Path, ...]
    promised: Sequence[Expected]
    record: ModelRecord | None

    def said(self) -> list[str | None]:
        known = self.promised or (None,) * len(self.files)
        return [expected_digest(path, one) for path, one in zip(self.files, known, strict=True)]


def _digest(path: Path, name: str, reporter: Reporter, missing: list[Path], unread: list[str]) -> str:
    try:
        return digest(path, reporter, f"hashing {name}")
    except FileNotFoundError:
        missing.append(path)
    except OSError as error:
        unread.append(f"{path}: cannot be read: {error.strerror}")
    return ""


def _check_tensors(first: Path, name: str, reporter: Reporter) -> tuple[int, list[str]]:
    """Check the header and all tensors. Returns the number of tensors and a message for each problem."""
    problems: list[str] = []
    tensors = 0
    try:
        with open_gguf(first) as file:
            tensors = len(file.tensors)
            problems.extend(islice(_unsound_tensors(file, name, reporter), _MOST_PROBLEMS))
    except LlmrunError as error:
        problems.append(str(error))
    return tensors, problems


def _unsound_tensors(file: GGUFFile, name: str, reporter: Reporter) -> Iterator[str]:
    """Yield a message for each tensor that contains NaN or infinity. Raises ModelFileError."""
    done, total = 0, sum(tensor.nbytes for tensor in file.tensors.values())
    for tensor in file.tensors.values():
        count, first = 0, -1
        for start, unsound in _checked_blocks(file, tensor):
            done += len(unsound) * tensor.type.block_bytes
            reporter.progress(f"checking the tensors of {name}", done, total)
            if unsound.any():
                first = first if count else start + int(np.argmax(unsound))
                count += int(unsound.sum())
        if count:
            what = "weights" if tensor.type.block_weights == 1 else f"blocks of {tensor.type.name}"
            of = tensor.nbytes // tensor.type.block_bytes
            yield f"{shown(tensor.name)}: {count:,} of {of:,} {what} contain NaN or infinity, first at {first:,}"


def _checked_blocks(
    file: GGUFFile, tensor: TensorInfo
) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Yield (index of the chunk's first block, bool[n] that marks blocks with NaN or infinity) for each chunk."""
    size = tensor.type.block_bytes
    step = max(_CHUNK // size, 1) * size
    buffer = np.empty(min(step, tensor.nbytes), np.uint8)
    for start in range(0, tensor.nbytes, step):
        part = buffer[: min(step, tensor.nbytes - start)]
        file.read_into(tensor, start, part)
        yield start // size, unsound_blocks(tensor.type, part)
