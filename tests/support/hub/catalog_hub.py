"""A fake of the Hub's repository API on 127.0.0.1, which lists files with their sizes and sha256."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# For each repository, its files (path: size and sha256), or the HTTP status of the refusal.
Repositories = dict[str, Mapping[str, tuple[int, str]] | int]


@dataclass
class CatalogHub:
    port: int
    asked: list[str] = field(default_factory=list)  # repositories, in the order of the requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def catalog_hub(repositories: Repositories) -> Iterator[CatalogHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            repository = urlsplit(self.path).path.removeprefix("/api/models/").removesuffix("/revision/main")
            hub.asked.append(repository)
            files = repositories.get(repository, 404)
            if isinstance(files, int):
                self.send_response(files)
                if files == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                return
            siblings = [
                {"rfilename": path, "size": size, "lfs": {"size": size, "sha256": sha256, "pointerSize": 134}}
                for path, (size, sha256) in files.items()
            ]
            siblings.append({"rfilename": "README.md", "size": 12})
            body = json.dumps({"id": repository, "sha": "0" * 40, "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = CatalogHub(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
