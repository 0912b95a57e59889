"""Downloads one file over parallel connections, with one thread per connection.

The download resumes partial files, hashes bytes as they arrive, and adapts the number of connections.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from llmrun.base.errors import BadGGUF, IntegrityError, LlmrunError
from llmrun.formats.gguf.format import MAGIC
from llmrun.hub.local.safe_writes import CHUNK
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.remote.http_ranges import PROGRESS, AnotherFile, Growth, Patience, RangeResponse, Remote, TryAgain
from llmrun.hub.transfer.partial_file import ByteRun, PartialFile

PART = 16 << 20  # bytes per request if there are several connections
_HOLD_BACK_S = 60.0  # seconds without new connections after one of several connections fails
_END_S = 2.0  # how long to wait for threads to end; a thread blocked in name resolution is abandoned


@dataclass(eq=False)
class Claim:
    """A byte range reserved for one thread. `end` may decrease if other connections take over part of the range."""

    start: int
    end: int
    run: ByteRun | None = None
    answer: RangeResponse | None = None

    @property
    def position(self) -> int:
        return self.run.written if self.run else self.start


class OtherVersion(Exception):
    """The server has a different version of the file, or does not confirm that the version is the same."""


class Connections:
    """A pool of connections that downloads the gaps of `partial` in order, starting with one connection.

    The pool is a context manager. After the context ends, no thread writes to the file.

    error          the exception that stopped the download; None if there was none
    other_version  whether the file on the server changed, so the download must restart
    notes          messages for the user
    """

    def __init__(self, remote: Remote, partial: PartialFile, patience: Patience) -> None:
        self.partial = partial
        self._remote, self._patience = remote, patience
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._claims: list[Claim] = []
        self._threads: list[threading.Thread] = []
        self.limit = 1
        self._without_ranges = False  # whether the server lacks support for range requests
        self._failed_at = -math.inf  # when one of several connections last failed
        self.other_version = False
        self.error: BaseException | None = None
        self.notes: list[str] = []

    def __enter__(self) -> Connections:
        self._start_threads()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with self._changed:
            answers = [claim.answer for claim in self._claims if claim.answer]
        for answer in answers:
            answer.hang_up()
        for thread in self._threads:
            thread.join(_END_S)

    @property
    def running(self) -> bool:
        with self._changed:
            return bool(self._claims)

    @property
    def refused(self) -> bool:
        """True if no connections may be added at the moment."""
        return self._without_ranges or time.monotonic() - self._failed_at < _HOLD_BACK_S

    def wait(self, seconds: float) -> None:
        """Wait until the last thread ends, for at most `seconds`."""
        with self._changed:
            if self._claims:
                self._changed.wait(seconds)

    def resize(self, limit: int) -> None:
        """Set the maximum number of connections. New connections take unfetched ranges from existing ones."""
        if limit == self.limit:
            return
        with self._changed:
            self.limit = limit
            if limit > 1:
                for claim in self._claims:
                    claim.end = min(claim.end, claim.position + PART)
        self._start_threads()

    # --- the threads --------------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        with self._changed:
            while len(self._claims) < self.limit and not self._stopping.is_set() and (claim := self._claim_next()):
                thread = threading.Thread(target=self._work, args=(claim,), name="llmrun-download", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _claim_next(self) -> Claim | None:
        """Claim the first range that is neither received nor claimed, if any. The caller must hold the lock."""
        claimed = sorted((claim.start, claim.end) for claim in self._claims)
        for start, end in self.partial.gaps():
            for taken, until in claimed:
                if taken >= end or until <= start:
                    continue
                if taken > start:
                    end = taken
                    break
                start = until
            if start < end:
                claim = Claim(start, end if self.limit == 1 else min(end, start + PART))
                self._claims.append(claim)
                return claim
        return None

    def _work(self, first: Claim) -> None:
        claim: Claim | None = first
        try:
            while claim is not None:
                try:
                    self._fetch(claim)
                except TryAgain as trouble:
                    if not self._may_retry(claim, trouble):
                        return
                with self._changed:
                    self._claims.remove(claim)
                    superfluous = len(self._claims) >= self.limit or self._stopping.is_set()
                    claim = None if superfluous else self._claim_next()
        except OtherVersion:
            self.other_version = True
            self._stopping.set()
        except BaseException as error:  # noqa: BLE001 (the waiting thread re-raises it)
            self.error = self.error or error
            self._stopping.set()
        finally:
            with self._changed:
                if claim in self._claims:
                    self._claims.remove(claim)
                if not self._claims or self._stopping.is_set():
                    self._changed.notify_all()

    def _may_retry(self, claim: Claim, trouble: TryAgain) -> bool:
        """Handle a temporary failure. Returns True after a delay, or False if this thread should end.

        The thread should end if the pool is stopping or other connections are still running.
        """
        if self._stopping.is_set():
            return False
        with self._changed:
            if len(self._claims) > 1:
                self._claims.remove(claim)
                self._failed_at, self.limit = time.monotonic(), len(self._claims)
                return False
            seconds = self._patience.wait_after(trouble, self.partial.received)
        if seconds >= 1.0:
            self.notes.append(f"{self._remote.file.path}: {trouble}; trying again in {seconds:,.0f} s")
        self._stopping.wait(seconds)
        return True

    def _fetch(self, claim: Claim) -> None:
        """Download the claimed range, and write the bytes to the file as they arrive."""
        partial, asked_to = self.partial, claim.end
        by_hash = self._remote.file.sha256 is not None  # the sha256 detects changes, so no validator is needed
        with self._remote.open(claim.start, asked_to, "" if by_hash else partial.validator) as answer:
            claim.answer = answer
            if self._stopping.is_set():
                return
            if not by_hash and self._may_be_another(answer):
                if len(self._claims) > 1:
                    raise TryAgain("the file on the server has changed")
                if answer.whole and not next(answer.pieces, b"").startswith(MAGIC):
                    raise AnotherFile("the response is not a GGUF file")  # unlike with OtherVersion, the bytes are kept
                raise OtherVersion
            if answer.whole:
                if len(self._claims) > 1:
                    raise TryAgain("the server does not support range requests")
                self._without_ranges = True
            if not by_hash:
                partial.name_version(answer.validator)
            claim.run = partial.begin(claim.start)
            try:
                self._write(claim, answer, asked_to)
            finally:
                partial.end(claim.run)

    def _may_be_another(self, answer: RangeResponse) -> bool:
        """Return whether the response may belong to a different version of the file than the bytes received so far."""
        before = self.partial.validator
        return before not in ("", answer.validator) or (answer.whole and not before and self.partial.received > 0)

    def _write(self, claim: Claim, answer: RangeResponse, asked_to: int) -> None:
        assert claim.run is not None
        for piece in _from(claim.start, answer.pieces) if answer.whole else answer.pieces:
            if self._stopping.is_set() or len(self._claims) > self.limit:
                return
            room = claim.end - claim.run.written
            self.partial.write(claim.run, piece[:room])
            if len(piece) > room:
                if claim.end < (self.partial.size if answer.whole else asked_to):
                    return  # another connection has received or claimed the rest of the range
                raise IntegrityError(f"the server sent more than {asked_to - claim.start:,} bytes")
        if claim.run.written < claim.end:
            raise TryAgain(f"the connection closed after {claim.run.written:,} of {self.partial.size:,} bytes")


def _from(start: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces after skipping their first `start` bytes."""
    passed = 0
    for piece in pieces:
        if passed + len(piece) > start:
            yield piece[max(0, start - passed) :]
        passed += len(piece)


SYNC_BYTES = 64 << 20  # number of received bytes after which fsync is called
_TELL_FROM = 256 << 20  # bytes; if this many remain to be hashed after the download, hashing shows progress
_TICK_S = 0.05
_AGAIN_S = 0.5
_ANOTHER = "choose another file or repository"
_ELSEWHERE = "try again later, or from another network"


class _NotGGUF(IntegrityError):
    """The file lacks the GGUF magic, for example because it is an HTML page or a mislabelled file."""

    def __init__(self) -> None:
        super().__init__("not a GGUF file")


def fetch(remote: Remote, partial: PartialFile, name: str, reporter: Reporter, begin: bytes = b"") -> str:
    """Download the missing ranges of `partial`, sync it to disk and return the sha256 of the whole file.

    If the content is not as expected, all bytes are discarded and the download restarts once. If a response belongs to
    another file, the received bytes are kept, and the request is repeated once, plus once after further progress.

    Raises IntegrityError if the retry fails in the same way, BadGGUF if a Hub file lacks the GGUF magic twice,
    NetworkError, ModelNotFound, DoesNotFit, or LlmrunError for disk errors. After any error or KeyboardInterrupt, the
    download can resume, unless the received bytes were discarded.

    name   the name to show in progress messages
    begin  the bytes that the file must begin with; any other beginning stops the download early
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

    The hasher reads the bytes back from the file, usually from the page cache. Therefore, hashing works for bytes of
    earlier runs and for bytes that arrive out of order, and never delays the network threads.
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
        """Hash the remaining bytes, and report progress if there are many."""
        size = self._partial.size
        long = size - self._done >= _TELL_FROM
        while self.advance():
            if long:
                reporter.progress(label, self._done, size)

    def hexdigest(self) -> str:
        return self._state.hexdigest()


class _Progress:
    """A filter that drops repeated progress values, except for a few in a stall, so that the displayed speed falls."""

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
