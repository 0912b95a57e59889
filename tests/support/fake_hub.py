"""A Hugging Face Hub on 127.0.0.1 that misbehaves on request: the repository's owner names what goes wrong."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

MODEL = b"GGUF" + random.Random(1).randbytes(2_500_000)  # three chunks
SHA256 = hashlib.sha256(MODEL).hexdigest()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HALF = len(MODEL) // 2
BODIES = {
    "truncated": MODEL[:HALF],
    "held": MODEL,
    "stalled": MODEL,
    "flipped": MODEL[:HALF] + bytes([MODEL[HALF] ^ 1]) + MODEL[HALF + 1 :],
    "long": MODEL + b"!",
    "unmeasured": MODEL[:HALF],
}
HEAD_STATUS = {"unauthorised": 401, "forbidden": 403, "gated": 403, "missing": 404, "broken": 500, "busy": 503}


@dataclass(frozen=True)
class Seen:
    """One request."""

    method: str
    path: str
    host: str
    authorization: str | None


@dataclass
class FakeHub:
    """`seen` has every request; a download from the owner `held` waits in the middle until `release` is set."""

    port: int
    seen: list[Seen] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def downloads(self) -> int:
        return sum(request.method == "GET" and "model.gguf" in request.path for request in self.seen)


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Handler.hub = FakeHub(server.server_address[1])
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield Handler.hub
    finally:
        Handler.hub.release.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        del format, args

    def _owner(self) -> str:
        self.hub.seen.append(
            Seen(self.command, self.path, self.headers.get("Host", ""), self.headers.get("Authorization"))
        )
        return self.path.split("/")[1]

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def do_HEAD(self) -> None:
        owner = self._owner()
        if owner == "silent":
            self.hub.release.wait(60)
        if owner in HEAD_STATUS:
            code = {"gated": "GatedRepo", "missing": "EntryNotFound"}.get(owner)
            self._answer(HEAD_STATUS[owner], {"X-Error-Code": code} if code else {})
        elif owner == "other-server":
            self._answer(200, {"Content-Length": str(len(MODEL))})
        elif owner == "renamed":
            self._answer(307, {"Location": self.path.replace("/renamed/", "/good/"), "Content-Length": "0"})
        else:
            etag = "f" * 64 if owner == "changed" else SHA256
            commit = "../../../../outside" if owner == "climbing" else COMMIT
            linked = {"X-Repo-Commit": commit, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(MODEL))}
            self._answer(302, linked | {"Location": self._storage(), "Content-Length": "0"})

    def _storage(self) -> str:
        """Another host, as the Hub's storage is: `localhost` is not `127.0.0.1`."""
        return f"http://localhost:{self.hub.port}/storage{self.path}"

    def do_GET(self) -> None:
        owner = self._owner()
        if owner != "storage":
            known = "/resolve/" in self.path
            self._answer(302 if known else 404, {"Location": self._storage()} if known else {"Content-Length": "0"})
            return
        owner = self.path.split("/")[2]
        if owner == "expired":
            self._answer(403, {"Content-Length": "0"})
            return
        body = BODIES.get(owner, MODEL)
        size = len(body) if owner in ("long", "flipped") else len(MODEL)
        self._answer(200, {} if owner == "unmeasured" else {"Content-Length": str(size)})
        with contextlib.suppress(ConnectionError):  # the client was killed, as the test meant it to be
            self.wfile.write(body[:HALF])
            self.wfile.flush()
            if owner in ("held", "stalled"):
                self.hub.release.wait(60)
            self.wfile.write(body[HALF:])
