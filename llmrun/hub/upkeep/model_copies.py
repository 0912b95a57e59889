"""Finds copies of another machine's models on this machine by their sha256, or receives the models.

A received model is stored in a folder of its own below the models folder. As with downloads, a file is renamed to its
final name only after its sha256 has been verified, and an interrupted transfer resumes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.errors import IntegrityError, LlmrunError
from llmrun.hub.local import paths
from llmrun.hub.local.model_records import known_digest, remember_digests
from llmrun.hub.local.paths import model_files
from llmrun.hub.local.safe_writes import digest, make_folder, put_in_place, require_space, writing
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.transfer.partial_file import ByteRun, PartialFile, remove
from llmrun.hub.upkeep.inventory import models

_SYNC_BYTES = 256 << 20  # received bytes between two syncs to disk


@dataclass(frozen=True, slots=True)
class OriginalFile:
    """One file of a model on another machine. `path` is the file's absolute path on the other machine."""

    path: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return Path(self.path).name


def originals(first: Path, reporter: Reporter) -> list[OriginalFile]:
    """Return the files of a model on this machine, whose first file is `first`. Unchanged files are hashed only once.

    Raises LlmrunError if a file cannot be read.
    """
    files = [path.absolute() for path in model_files(first)]
    try:
        digests = file_digests(files, reporter, "hashing")
        return [
            OriginalFile(str(path), path.stat().st_size, sha256) for path, sha256 in zip(files, digests, strict=True)
        ]
    except OSError as error:
        raise LlmrunError(f"{error.filename or first}: cannot be read: {error.strerror}") from error


def find_copy(files: Sequence[OriginalFile], reporter: Reporter) -> Path | None:
    """Return the first file of a model on this machine with the same contents, or None.

    The paths on the other machine are tried first, because the machines may share a folder, then received models, then
    all other models. Models of different sizes are not read.
    """
    for candidate in _candidates(files):
        try:
            sizes = [path.stat().st_size for path in candidate]
            if sizes == [file.size for file in files] and file_digests(candidate, reporter, "checking") == [
                file.sha256 for file in files
            ]:
                return candidate[0]
        except OSError:
            continue  # the file is not on this machine, or was removed in the meantime
    return None


class IncomingModel:
    """A model that another machine is sending. Only one process receives a model at a time."""

    def __init__(self, files: Sequence[OriginalFile]) -> None:
        """Prepare to receive a model. Raises LlmrunError, UsageError, or DoesNotFit if the disk is too full."""
        self._files = files
        self._finals = _received(files)
        self._held = contextlib.ExitStack()
        self._partial: PartialFile | None = None
        self._run: ByteRun | None = None
        self._index = 0
        self._unsynced = 0

    def take(self) -> bool:
        """Lock the model. Returns False if another process is receiving the model."""
        import filelock

        first = self._finals[0]
        lock = paths.lock_file(str(first))
        make_folder(lock.parent, paths.models_folder())
        make_folder(first.parent, paths.models_folder())
        with writing(lock):
            try:
                self._held.enter_context(filelock.FileLock(lock, timeout=0))
            except filelock.Timeout:
                return False
        require_space(first.parent, sum(file.size for file in self._files) - self._present_bytes(), first.name)
        return True

    def begin(self, index: int) -> int:
        """Begin or continue the file with this index, and return how many of its bytes have already been received."""
        file, final = self._files[index], self._finals[index]
        self._index = index
        self._partial = PartialFile(paths.partial_of(final), file.size, file.sha256)
        frontier = self._partial.frontier
        self._run = self._partial.begin(frontier)
        return frontier

    def write(self, data: bytes) -> None:
        """Append bytes to the current file. Raises DoesNotFit if the disk is full."""
        assert self._partial is not None
        assert self._run is not None
        self._partial.write(self._run, data)
        self._unsynced += len(data)
        if self._unsynced >= _SYNC_BYTES:
            self._partial.sync()
            self._unsynced = 0

    def end(self, reporter: Reporter) -> None:
        """Verify the current file and give it its final name. Raises IntegrityError and discards a damaged file."""
        assert self._partial is not None
        partial, file, final = self._partial, self._files[self._index], self._finals[self._index]
        partial.sync()
        with writing(partial.path):
            seen = digest(partial.path, reporter, f"checking {final.name}")
        if seen != file.sha256:
            partial.clear()
            raise IntegrityError(f"{final.name}: its sha256 is {seen}, expected {file.sha256}")
        put_in_place(partial.path, final)
        partial.close()
        self._partial = None
        with writing(final):
            remove(paths.partial_of(final))

    def finish(self) -> Path:
        """Record the digests of all files, and return the first file."""
        remember_digests(self._finals, [file.sha256 for file in self._files], name="", source="")
        self.close()
        return self._finals[0]

    def close(self) -> None:
        """Release the lock. Received bytes are kept, so that a later transfer can resume. This method is idempotent."""
        if self._partial is not None:
            self._partial.close()
            self._partial = None
        self._held.close()

    def _present_bytes(self) -> int:
        present = 0
        for path in (*self._finals, *map(paths.partial_of, self._finals)):
            with contextlib.suppress(OSError):
                present += path.stat().st_size  # a partial file has no gaps, because its bytes arrive in order
        return present


def _candidates(files: Sequence[OriginalFile]) -> Iterator[Sequence[Path]]:
    yield [Path(file.path) for file in files]
    yield _received(files)
    for model in models():
        if len(model.files) == len(files):
            yield model.files


def _received(files: Sequence[OriginalFile]) -> list[Path]:
    return [paths.received_file(files[0].sha256, file.name) for file in files]


def file_digests(files: Sequence[Path], reporter: Reporter, doing: str) -> list[str]:
    """Return and record the sha256 of each file of a model, so that unchanged files are hashed only once.

    doing  the first word of the progress label

    Raises OSError.
    """
    known = [known_digest(path) for path in files]
    if None not in known:
        return [sha256 for sha256 in known if sha256 is not None]
    found = [
        sha256 or digest(path, reporter, f"{doing} {path.name}") for path, sha256 in zip(files, known, strict=True)
    ]
    remember_digests(files, found, name="", source="")
    return found
