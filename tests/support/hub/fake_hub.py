"""A Hugging Face Hub on this machine: repositories made by a test, in memory, that go wrong when the test says so.

It speaks what the real huggingface_hub client asks for: the files (`/ORG/REPO/resolve/REV/FILE`, HEAD and GET), their
redirect to a storage that is another host and another port, Range and If-Range, and the API (`/api/models?search=`,
`/api/models/ORG/REPO`, `/revision/REV`, `/tree/REV`, `/paths-info/REV`, `/refs`). Threads, one a connection; a start
takes a millisecond.

    with fake_hub() as hub:
        made = hub.add("org/repo", {"model.gguf": data, "README.md": b"..."})      # commit, sha256 and sizes follow
        hub.add("org/repo", {"model.gguf": other})                                # a new commit; `main` moves to it
        hub.add("org/private", files, token="hf_x")                               # 401 for everybody else
        hub.add("org/gated", files, gated=True)                                   # files are 403 GatedRepo; API answers
        monkeypatch.setenv("HF_ENDPOINT", hub.url)                                # before huggingface_hub is imported
        hub.faults.append(Fault(cut_after=1000))                                  # befalls the next file from storage
        hub.faults.append(Fault(on="hub", status=503, times=2))                   # the next two questions for a file
        ...
        assert [asked.range for asked in hub.asked if asked.at == "storage"] == ["bytes=0-", "bytes=1000-"]

`hub.asked` has every request, with the bytes of the file that were sent; looking at it waits for the answers under way,
but for those that stall. Files that end in
.gguf are large files (LFS: sha256, redirect to the storage); all others are sent by the Hub itself. A process that must
use this Hub gets `HF_ENDPOINT=hub.url`, and `NO_PROXY=*` where the machine has a proxy.
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

MODEL = b"GGUF" + random.Random(1).randbytes(2_500_000)  # three chunks
SHA256 = hashlib.sha256(MODEL).hexdigest()
HALF = len(MODEL) // 2

STALL_TICK_S = 0.01  # how often a stall looks whether its client has left

Place = Literal["hub", "storage", "api"]  # questions for a file; the file's bytes; questions about a repository


@dataclass
class Fault:
    """What goes wrong with the next request `at` a place; after `times` requests it is gone.

    skip          requests that are answered well before it begins
    status        this instead of the answer, with no body and with `headers`
    headers       in place of those of the answer; an empty text leaves one out
    cut_after     bytes of the body, then the connection ends
    stall_after   bytes of the body, then silence until the client leaves or `hub.release` is set
    alter         changes the body's bytes; the headers stay as they were
    ignore_range  200 and the whole file for a request of a range
    first         is run before the answer: `lambda: hub.add(...)` is a file that changes
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
    """One request, and how it was answered. Header values are "" where the request had none."""

    at: Place
    method: str
    path: str  # with the query
    host: str  # with the port
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
        """As the Hub gives it: the sha256 of a large file, git's name of any other."""
        if self.large:
            return self.sha256
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content, usedforsecurity=False).hexdigest()


@dataclass
class FakeRepository:
    """`commits` holds the files of each commit, `branches` the commit of each branch and tag."""

    name: str
    gated: bool = False
    token: str | None = None  # that a question must bring; None: public
    commits: dict[str, dict[str, FakeFile]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """Of `main`."""
        return self.branches["main"]

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def file(self, path: str) -> FakeFile:
        return self.commits[self.commit][path]


class FakeHub:
    """`url` is the Hub, `storage_url` where it keeps large files: another host name and another port.

    faults            what is to go wrong, in this order; the first that fits a request is taken
    release           ends every stall
    bytes_per_second  limit of one connection; None: as fast as it goes
    total_per_second  limit of all connections together
    latency           seconds before each answer
    """

    def __init__(self) -> None:
        self.repositories: dict[str, FakeRepository] = {}
        self.moved: dict[str, str] = {}  # old name of a repository -> its name; answered with a redirect
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
        self.objects: dict[str, FakeFile] = {}  # sha256 -> what the storage has
        self.busy_until = 0.0  # of the line that all connections share
        self.pacing = threading.Lock()
        self.oldest_signature = 0  # of an address at the storage; older ones are answered with 403
        self._signature = 0
        self._ports = (0, 0)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def asked(self) -> list[Asked]:
        """Every request in the order in which they came; answers under way are waited for, for a while."""
        if self._stalled:
            time.sleep(5 * STALL_TICK_S)  # one whose client has left is about to notice it
        with self._quiet:
            self._quiet.wait_for(lambda: self._answering <= 0, timeout=2.0)
            return [asked for _, asked in sorted(self._asked, key=lambda pair: pair[0])]

    def begin(self) -> int:
        """An answer is under way. Its number."""
        with self._quiet:
            self._answering += 1
            self._begun += 1
            return self._begun

    def write_down(self, number: int, asked: Asked) -> None:
        """The answer has ended."""
        with self._quiet:
            self._answering -= 1
            self._asked.append((number, asked))
            self._quiet.notify_all()

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """The answer is silent meanwhile, and not waited for."""
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
        """A commit with exactly these files; the branch moves to it. The repository is made if it is new."""
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
        """The address of a file that the storage gives to everybody, as any web server would."""
        file = FakeFile(name, content)
        self.objects[file.sha256] = file
        return f"{self.storage_url}/public/{file.sha256}/{name}"

    def expire(self) -> None:
        """No address at the storage that was given out until now is good any more."""
        with self._lock:
            self.oldest_signature = self._signature + 1

    def next_signature(self) -> int:
        with self._lock:
            self._signature += 1
            return self._signature

    def next_fault(self, at: Place) -> Fault | None:
        """What befalls a request; every call is a request."""
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
        """Requests that were begun, of every kind."""
        with self._quiet:
            return self._begun

    def sent(self) -> int:
        """Bytes of large files that were sent so far."""
        return sum(asked.sent for asked in self.asked if asked.at == "storage")

    def downloads(self) -> int:
        """Requests for the bytes of large files."""
        return sum(asked.at == "storage" and asked.method == "GET" for asked in self.asked)

    def hear(self, hub_port: int, storage_port: int) -> None:
        self._ports = (hub_port, storage_port)


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A Hub without repositories, until the block ends."""
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
        """A client that was killed in the middle of an answer is what the tests are about."""
