"""Downloads one file. Resumes partial downloads, hashes while downloading and adapts the number of connections."""

from __future__ import annotations

import hashlib
import time

from llmrun.base.errors import BadGGUF, IntegrityError, LlmrunError
from llmrun.hub.local.safe_writes import CHUNK
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.remote.backoff import PROGRESS, Growth, Patience
from llmrun.hub.remote.http_ranges import AnotherFile, Remote, TryAgain
from llmrun.hub.transfer.connections import Connections
from llmrun.hub.transfer.partial_file import PartialFile

SYNC_BYTES = 64 << 20  # number of received bytes after which fsync is called
_TELL_FROM = 256 << 20  # bytes; if this many remain to be hashed after the download, hashing shows progress
_TICK_S = 0.05
_AGAIN_S = 0.5
_ANOTHER = "choose another file or repository"
_ELSEWHERE = "try again later, or from another network"


class _NotGGUF(IntegrityError):
    """The file lacks the GGUF magic. It may be an HTML page or a mislabelled file in a repository."""

    def __init__(self) -> None:
        super().__init__("not a GGUF file")


def fetch(remote: Remote, partial: PartialFile, name: str, reporter: Reporter, begin: bytes = b"") -> str:
    """Download the missing ranges of `partial`, sync it to disk and return the sha256 of the whole file.

    If the content is not as expected, all bytes are discarded and the download restarts once. If a response belongs to
    another file, the received bytes are kept and the request is repeated once. It may be repeated again after some
    progress.

    Raises IntegrityError if either happens again, BadGGUF if a Hub file lacks the GGUF magic twice, NetworkError,
    ModelNotFound, DoesNotFit, or LlmrunError for disk errors. After any error or KeyboardInterrupt, the download can
    resume, unless the received bytes were discarded.

    name   the name to show in progress messages
    begin  the bytes that the file must begin with; if they differ, the download stops early
    """
    path = remote.file.path
    fetched_again, asked_at = False, -PROGRESS
    while True:
        try:
            return _fetch_right(remote, partial, name, reporter, begin)
        except AnotherFile as error:
            if partial.received < asked_at + PROGRESS:
                kept = f"; keeping the {partial.received:,} bytes received before" if partial.received else ""
                raise IntegrityError(f"{path}: {error}{kept}", hint=_ELSEWHERE) from error
            asked_at = partial.received
            reporter.note(f"{path}: {error}; trying once more")
        except IntegrityError as error:
            partial.clear()
            if fetched_again and isinstance(error, _NotGGUF) and remote.file.sha256 is not None:
                raise BadGGUF(f"{path}: {error}; nothing was kept", hint=_ANOTHER) from error
            if fetched_again:
                raise IntegrityError(f"{path}: {error}; nothing was kept", hint=_ELSEWHERE) from error
            fetched_again = True
            reporter.note(f"{path}: {error}; downloading it again from the beginning")


def _fetch_right(remote: Remote, partial: PartialFile, name: str, reporter: Reporter, begin: bytes) -> str:
    """Download the file. Raises IntegrityError, without retrying, if the content is not as expected."""
    file = remote.file
    progress = _Progress(f"downloading {name}", file.size, reporter)
    patience = Patience(file.path, file.size, partial.received)
    hasher = _FileHasher(partial)
    several = True  # whether several connections are allowed
    while partial.gaps():
        with Connections(remote, partial, patience) as connections:
            _follow(connections, hasher, progress, several, begin)
        if connections.error is not None:
            raise _named(connections.error, file.path)
        if connections.other_version:
            # The old version can no longer be resumed, so restart from the beginning over a single connection.
            trouble = TryAgain("the file on the server has changed")
            patience.wait_after(trouble, partial.received)
            partial.clear()
            hasher, several = _FileHasher(partial), False
    progress.tell(file.size)
    hasher.finish(f"checking {name}", reporter)
    partial.sync()
    seen = hasher.hexdigest()
    if file.sha256 not in (None, seen):
        raise IntegrityError(f"wrong sha256: {seen}, expected {file.sha256}")
    _require_begin(partial, begin)
    return seen


def _require_begin(partial: PartialFile, begin: bytes) -> None:
    if begin and partial.read(0, len(begin)) != begin:
        raise _NotGGUF


def _follow(connections: Connections, hasher: _FileHasher, progress: _Progress, several: bool, begin: bytes) -> None:
    """Hash, sync, report progress and adjust the number of connections while other threads download."""
    partial = connections.partial
    received = synced = partial.received
    growth, held_back = Growth(time.monotonic(), received), False
    looked_at = False
    while connections.running:
        if not looked_at and partial.frontier >= len(begin):  # if the file is not GGUF, stop early
            _require_begin(partial, begin)
            looked_at = True
        if not hasher.advance():
            connections.wait(_TICK_S)
        received = partial.received
        progress.tell(min(received, partial.size - 1))  # 100 % is shown only after all threads have ended
        while connections.notes:
            progress.note(connections.notes.pop(0))
        if received - synced >= SYNC_BYTES:
            partial.sync()
            synced = received
        if connections.refused:
            held_back = True
        elif several:
            now, missing = time.monotonic(), partial.size - received
            if held_back:
                growth, held_back = Growth(now, received), False
            connections.resize(growth.advise(now, received, missing, connections.limit))


class _FileHasher:
    """An incremental sha256 of the partial file, up to its first gap.

    It reads the bytes back from the file, usually from the page cache. Therefore, it works for bytes of earlier runs
    and for bytes that arrive out of order, and it never delays the network threads.
    """

    def __init__(self, partial: PartialFile) -> None:
        self._partial = partial
        self._state = hashlib.sha256()
        self._done = 0

    def advance(self) -> bool:
        """Hash the next chunk. Returns False if the chunk has not arrived yet."""
        count = min(CHUNK, self._partial.frontier - self._done)
        if count <= 0:
            return False
        data = self._partial.read(self._done, count)
        if not data:
            raise LlmrunError(f"disk: {self._partial.path}: another program truncated the file to {self._done:,} bytes")
        self._state.update(data)
        self._done += len(data)
        return True

    def finish(self, label: str, reporter: Reporter) -> None:
        """Hash the remaining bytes, with progress if there are many."""
        size = self._partial.size
        long = size - self._done >= _TELL_FROM
        while self.advance():
            if long:
                reporter.progress(label, self._done, size)

    def hexdigest(self) -> str:
        return self._state.hexdigest()


class _Progress:
    """A filter that drops repeated progress values, except for a few during a stall, so that the shown speed falls."""

    def __init__(self, label: str, total: int, reporter: Reporter) -> None:
        self._label, self._total, self._reporter = label, total, reporter
        self._reported, self._when = -1, 0.0

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if done != self._reported or now - self._when >= _AGAIN_S:
            self._reported, self._when = done, now
            self._reporter.progress(self._label, done, self._total)

    def note(self, line: str) -> None:
        self._reporter.note(line)


def _named(error: BaseException, file: str) -> BaseException:
    """Return the error with the file name prepended, unless its message already begins with the file name or "disk"."""
    if not isinstance(error, LlmrunError) or isinstance(error, IntegrityError):
        return error
    if str(error).startswith(("disk: ", f"{file}: ")):
        return error
    return type(error)(f"{file}: {error}", hint=error.hint)
