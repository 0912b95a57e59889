"""Downloads the missing ranges of a file over parallel connections, with one thread per connection."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from llmrun.base.errors import IntegrityError
from llmrun.formats.gguf.format import MAGIC
from llmrun.hub.remote.backoff import Patience
from llmrun.hub.remote.http_ranges import AnotherFile, RangeResponse, Remote, TryAgain
from llmrun.hub.transfer.partial_file import ByteRun, PartialFile

PART = 16 << 20  # bytes per request if there are several connections
_HOLD_BACK_S = 60.0  # after one of several connections fails, none are added for this long
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
        """Download the claimed range and write the bytes that arrive to the file."""
        partial, asked_to = self.partial, claim.end
        by_hash = self._remote.file.sha256 is not None  # the hash then detects changes, so no validator is needed
        with self._remote.open(claim.start, asked_to, "" if by_hash else partial.validator) as answer:
            claim.answer = answer
            if self._stopping.is_set():
                return
            if not by_hash and self._may_be_another(answer):
                if len(self._claims) > 1:
                    raise TryAgain("the file on the server has changed")
                if answer.whole and not next(answer.pieces, b"").startswith(MAGIC):
                    raise AnotherFile("the response is not a GGUF file")  # unlike OtherVersion, this keeps the bytes
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
            if self._stopping.is_set() or self._is_superfluous():
                return
            room = claim.end - claim.run.written
            self.partial.write(claim.run, piece[:room])
            if len(piece) > room:
                if claim.end < (self.partial.size if answer.whole else asked_to):
                    return  # another connection has received or claimed the rest
                raise IntegrityError(f"the server sent more than {asked_to - claim.start:,} bytes")
        if claim.run.written < claim.end:
            raise TryAgain(f"the connection closed after {claim.run.written:,} of {self.partial.size:,} bytes")

    def _is_superfluous(self) -> bool:
        return len(self._claims) > self.limit


def _from(start: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces after skipping their first `start` bytes."""
    passed = 0
    for piece in pieces:
        if passed + len(piece) > start:
            yield piece[max(0, start - passed) :]
        passed += len(piece)
