"""A fake Hugging Face Hub on this machine, with in-memory repositories and faults that tests can inject.

It implements what the real huggingface_hub client uses: files (`/ORG/REPO/resolve/REV/FILE`, HEAD and GET), their
redirect to a storage with another host name and port, Range and If-Range, and the API (`/api/models?search=`,
`/api/models/ORG/REPO`, `/revision/REV`, `/tree/REV`, `/paths-info/REV`, `/refs`). Each connection has its own thread.
Starting the Hub takes a millisecond.

    with fake_hub() as hub:
        made = hub.add("org/repo", {"model.gguf": data, "README.md": b"..."})      # computes commit, sha256 and sizes
        hub.add("org/repo", {"model.gguf": other})                                # a new commit on `main`
        hub.add("org/private", files, token="hf_x")                               # 401 without the token
        hub.add("org/gated", files, gated=True)                                   # 403 GatedRepo for its files
        monkeypatch.setenv("HF_ENDPOINT", hub.url)                                # before huggingface_hub is imported
        hub.faults.append(Fault(cut_after=1000))                                  # the next file from storage
        hub.faults.append(Fault(on="hub", status=503, times=2))                   # the next two requests for a file
        ...
        assert [asked.range for asked in hub.asked if asked.at == "storage"] == ["bytes=0-", "bytes=1000-"]

`hub.asked` lists every request and how many bytes of the file were sent. Reading it waits for answers in progress,
except stalled ones. Files that end in .gguf are large files (LFS: sha256, redirect to the storage). The Hub itself
sends all others. A child process that should use this Hub gets `HF_ENDPOINT=hub.url`, and `NO_PROXY=*` if the machine
has a proxy.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import ThreadingHTTPServer
from typing import Literal

MODEL = b"GGUF" + random.Random(1).randbytes(2_500_000)  # spans three chunks
SHA256 = hashlib.sha256(MODEL).hexdigest()
HALF = len(MODEL) // 2

STALL_TICK_S = 0.01  # seconds between checks for a disconnected client during a stall

Place = Literal["hub", "storage", "api"]  # requests for a file, for its bytes, or about a repository


@dataclass
class Fault:
    """An error in the answers to the next `times` requests at `on`.

    skip          number of requests to answer normally first
    status        HTTP status to send instead of the answer, with no body and with `headers`
    headers       override the answer's headers; an empty value removes a header
    cut_after     bytes of the body to send before closing the connection
    stall_after   bytes of the body to send before stalling until the client leaves or `hub.release` is set
    alter         changes the body's bytes but not the headers
    ignore_range  answer range requests with 200 and the whole file
    first         runs before the answer; `lambda: hub.add(...)` changes the file mid-download
    """

    on: Place = "storage"
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    stall_after: int | None = None
    alter: Callable[[bytes], bytes] | None = None
    ignore_range: bool = False
    first: Callable[[], object] | None = None


@dataclass(frozen=True)
class Asked:
    """One request and its answer. Missing headers are ""."""

    at: Place
    method: str
    path: str  # including the query
    host: str  # including the port
    authorization: str
    range: str
    if_range: str
    status: int
    sent: int  # bytes of the body


@dataclass(frozen=True)
class FakeFile:
    path: str
    content: bytes

    @property
    def large(self) -> bool:
        return self.path.lower().endswith(".gguf")

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def etag(self) -> str:
        """The ETag, as the Hub computes it: sha256 for large files, git's blob hash for all others."""
        if self.large:
            return self.sha256
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content, usedforsecurity=False).hexdigest()


@dataclass
class FakeRepository:
    """A repository. `commits` holds the files of each commit, `branches` the commit of each branch and tag."""

    name: str
    gated: bool = False
    token: str | None = None  # required from clients; None if public
    commits: dict[str, dict[str, FakeFile]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """The commit of `main`."""
        return self.branches["main"]

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def file(self, path: str) -> FakeFile:
        return self.commits[self.commit][path]


class FakeHub:
    """A running fake Hub.

    `url` is the address of the Hub. `storage_url`, where it keeps large files, has another host name and port.

    faults            errors to apply, in order; each request takes the first that fits
    release           ends every stall when set
    bytes_per_second  limit per connection, or None
    total_per_second  limit for all connections together, or None
    latency           seconds before each answer
    """

    def __init__(self) -> None:
        self.repositories: dict[str, FakeRepository] = {}
        self.moved: dict[str, str] = {}  # old repository name -> new name; old names redirect
        self.faults: list[Fault] = []
        self._asked: list[tuple[int, Asked]] = []
        self._begun = 0
        self._answering = 0
        self._stalled = 0
        self._quiet = threading.Condition()
        self.release = threading.Event()
        self.bytes_per_second: float | None = None
        self.total_per_second: float | None = None
        self.latency = 0.0
        self.objects: dict[str, FakeFile] = {}  # the storage's files by sha256
        self.busy_until = 0.0  # when the bandwidth shared by all connections is free again
        self.pacing = threading.Lock()
        self.oldest_signature = 0  # URLs with an older signature are answered with 403
        self._signature = 0
        self._ports = (0, 0)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def asked(self) -> list[Asked]:
        """Every request in order of arrival. Waits up to two seconds for answers in progress."""
        if self._stalled:
            time.sleep(5 * STALL_TICK_S)  # a stalled answer whose client has left notices it within one tick
        with self._quiet:
            self._quiet.wait_for(lambda: self._answering <= 0, timeout=2.0)
            return [asked for _, asked in sorted(self._asked, key=lambda pair: pair[0])]

    def begin(self) -> int:
        """Count an answer as in progress and return its number."""
        with self._quiet:
            self._answering += 1
            self._begun += 1
            return self._begun

    def write_down(self, number: int, asked: Asked) -> None:
        """Record a finished answer."""
        with self._quiet:
            self._answering -= 1
            self._asked.append((number, asked))
            self._quiet.notify_all()

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Exclude a stalled answer from those that `asked` waits for."""
        with self._quiet:
            self._answering -= 1
            self._stalled += 1
            self._quiet.notify_all()
        try:
            yield
        finally:
            with self._quiet:
                self._answering += 1
                self._stalled -= 1

    @property
    def storage_url(self) -> str:
        return f"http://localhost:{self._ports[1]}"

    def add(
        self,
        repository: str,
        files: Mapping[str, bytes],
        *,
        branch: str = "main",
        gated: bool = False,
        token: str | None = None,
    ) -> FakeRepository:
        """Commit exactly these files and move the branch to the commit. Creates the repository if it is new."""
        with self._lock:
            made = self.repositories.setdefault(repository, FakeRepository(repository))
            made.gated, made.token = gated, token
            held = {path: FakeFile(path, content) for path, content in files.items()}
            text = "".join(f"{path} {file.sha256}\n" for path, file in sorted(held.items()))
            commit = hashlib.sha1(f"{repository}\n{text}".encode(), usedforsecurity=False).hexdigest()
            made.commits[commit] = held
            made.branches[branch] = commit
            made.branches.setdefault("main", commit)
            self.objects |= {file.sha256: file for file in held.values()}
            return made

    def public(self, content: bytes, name: str = "model.gguf") -> str:
        """Add a file that needs no signature, as on any web server, and return its URL."""
        file = FakeFile(name, content)
        self.objects[file.sha256] = file
        return f"{self.storage_url}/public/{file.sha256}/{name}"

    def expire(self) -> None:
        """Expire every storage URL handed out so far."""
        with self._lock:
            self.oldest_signature = self._signature + 1

    def next_signature(self) -> int:
        with self._lock:
            self._signature += 1
            return self._signature

    def next_fault(self, at: Place) -> Fault | None:
        """Return the fault for one request, if any. Each call counts as a request."""
        with self._lock:
            for fault in self.faults:
                if fault.on != at:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                return fault
            return None

    def started(self) -> int:
        """Return the number of requests received, of every kind."""
        with self._quiet:
            return self._begun

    def sent(self) -> int:
        """Return the number of bytes of large files sent so far."""
        return sum(asked.sent for asked in self.asked if asked.at == "storage")

    def downloads(self) -> int:
        """Return the number of GET requests for large files."""
        return sum(asked.at == "storage" and asked.method == "GET" for asked in self.asked)

    def hear(self, hub_port: int, storage_port: int) -> None:
        self._ports = (hub_port, storage_port)


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a Hub without repositories until the block ends."""
    from tests.support.hub.fake_hub_server import HubHandler, StorageHandler

    hub = FakeHub()
    servers = [_Server(("127.0.0.1", 0), type("Bound", (kind,), {"hub": hub})) for kind in (HubHandler, StorageHandler)]
    hub.hear(*(server.server_address[1] for server in servers))
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.release.set()
        for server in servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, because the tests kill clients in the middle of answers."""
