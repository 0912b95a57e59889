"""The request handlers of the fake Hub and its storage. See fake_hub.py for how to use them."""

from __future__ import annotations

import json
import re
import selectors
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.hub.fake_hub import STALL_TICK_S, Asked, FakeFile, FakeHub, FakeRepository, Fault, Place

_PIECE = 1 << 16  # bytes per write
_LONGEST_STALL_S = 60.0
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_RESOLVE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree|paths-info|refs)(?:/(?P<rest>.*))?)?")


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    place: Place = "hub"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        del format, args

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def _handle(self) -> None:
        """Answer the request and record the answer. A fault that replaces the answer takes precedence."""
        number = self.hub.begin()
        self._status, self._sent = 0, 0
        path = urlsplit(self.path).path
        self.place = "api" if path.startswith("/api/") else type(self).place
        self._fault = self.hub.next_fault(self.place) or Fault()
        try:
            self._posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(self.hub.latency)
            if self._fault.first:
                self._fault.first()
            if self._fault.status is not None:
                self._answer(self._fault.status)
            else:
                self.answer(unquote(path))
        except OSError:  # the client disconnected
            self.close_connection = True
        finally:
            self._write_down(number)

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def _write_down(self, number: int) -> None:
        host, authorization, span, if_range = (
            self.headers.get(name) or "" for name in ("Host", "Authorization", "Range", "If-Range")
        )
        self.hub.write_down(
            number,
            Asked(self.place, self.command, self.path, host, authorization, span, if_range, self._status, self._sent),
        )

    def _answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        """Send a response. `Content-Length` is the length of the body unless the headers override it."""
        said = {"Content-Length": str(len(body))} | dict(headers or {}) | dict(self._fault.headers)
        self._status = status
        self.send_response(status)
        for name, value in said.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(self._fault.alter(body) if self._fault.alter else body)

    def _send(self, body: bytes) -> None:
        limits = [limit for limit in (self._fault.cut_after, self._fault.stall_after) if limit is not None]
        end = min([len(body), *limits])
        started = time.monotonic()
        while self._sent < end:
            piece = body[self._sent : min(self._sent + _PIECE, end)]
            self.wfile.write(piece)
            self._sent += len(piece)
            self._pace(started)
        if self._fault.stall_after is not None and not self.hub.release.is_set():
            with self.hub.stalling():
                self._wait_for_the_end()
            self.wfile.write(body[end:])
            self._sent = len(body)
        if self._fault.cut_after is not None:
            self.close_connection = True

    def _pace(self, started: float) -> None:
        rate = self.hub.bytes_per_second
        if self.hub.total_per_second:
            with self.hub.pacing:
                self.hub.busy_until = max(self.hub.busy_until, time.monotonic()) + _PIECE / self.hub.total_per_second
                ready = self.hub.busy_until
            time.sleep(max(0.0, ready - time.monotonic()))
        elif rate:
            time.sleep(max(0.0, started + self._sent / rate - time.monotonic()))

    def _wait_for_the_end(self) -> None:
        """Wait until `release` is set or the client disconnects."""
        until = time.monotonic() + _LONGEST_STALL_S
        with selectors.DefaultSelector() as connection:
            connection.register(self.connection, selectors.EVENT_READ)
            while time.monotonic() < until and not self.hub.release.wait(STALL_TICK_S):
                if connection.select(0) and not self.connection.recv(1):
                    raise ConnectionResetError

    def _send_file(self, file: FakeFile, headers: Mapping[str, str]) -> None:
        """Send the file, or the requested range of it."""
        whole, size = file.content, len(file.content)
        said = {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"} | dict(headers)
        asked = None if self._fault.ignore_range else _RANGE.fullmatch(self.headers.get("Range") or "")
        if asked and self.headers.get("If-Range") in (None, said["ETag"]):
            first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
            if first >= size:
                self._answer(416, {"Content-Range": f"bytes */{size}"})
                return
            said["Content-Range"] = f"bytes {first}-{last}/{size}"
            self._answer(206, said, whole[first : last + 1])
        elif self.command == "HEAD":
            self._answer(200, said | {"Content-Length": str(size)})
        else:
            self._answer(200, said, whole)


class StorageHandler(_Handler):
    place: Place = "storage"

    def answer(self, path: str) -> None:
        """Answer /objects/SHA256/NAME, which needs a valid signature, and /public/SHA256/NAME, which does not."""
        _, kind, sha256, *_ = [*path.split("/"), "", ""]
        signature = int(parse_qs(urlsplit(self.path).query).get("signature", ["-1"])[0])
        file = self.hub.objects.get(sha256)
        if file is None:
            self._answer(404)
        elif kind != "public" and signature < self.hub.oldest_signature:
            self._answer(403)
        else:
            self._send_file(file, {})


class HubHandler(_Handler):
    place: Place = "hub"

    def answer(self, path: str) -> None:
        if path == "/api/models":
            self._answer_search()
            return
        found = _API.fullmatch(path) or _RESOLVE.fullmatch(path)
        if found is None:
            self._answer(404)
            return
        name = found["name"]
        if name in self.hub.moved:
            target = self.path.replace(name, self.hub.moved[name], 1)
            self._answer(307, {"Location": target})
            return
        repository = self.hub.repositories.get(name)
        if repository is None or repository.token not in (None, self._token()):
            self._refuse(401, "RepoNotFound", "Repository Not Found")
        elif "what" in found.groupdict():
            self._answer_api(repository, found["what"] or "", found["rest"] or "")
        elif repository.gated:
            self._refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        else:
            self._answer_resolve(repository, found["revision"], found["file"])

    def _answer_search(self) -> None:
        """List the repositories that have GGUF files and whose names contain the search text, oldest first."""
        query = parse_qs(urlsplit(self.path).query)
        assert query["filter"] == ["gguf"]
        assert query["sort"] == ["downloads"]
        found = [
            {"id": made.name, "downloads": 1000 - number, "likes": number, "tags": ["gguf", "license:mit"]}
            | {"gated": "manual" if made.gated else False}
            for number, made in enumerate(self.hub.repositories.values())
            if query.get("search", [""])[0].lower() in made.name.lower() and made.token in (None, self._token())
        ]
        body = json.dumps(found[: int(query["limit"][0])]).encode()
        self._answer(200, {"Content-Type": "application/json"}, body)

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(status, {"X-Error-Code": code, "X-Error-Message": message})

    def _answer_resolve(self, repository: FakeRepository, revision: str, path: str) -> None:
        commit = repository.commit_of(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", "Revision Not Found")
            return
        file = repository.commits[commit].get(path)
        if file is None:
            self._answer(
                404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit}
            )
        elif file.large:
            location = f"{self.hub.storage_url}/objects/{file.sha256}/x?signature={self.hub.next_signature()}"
            linked = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
            self._answer(302, linked | {"X-Repo-Commit": commit, "Location": location})
        else:
            self._send_file(file, {"X-Repo-Commit": commit})

    def _answer_api(self, repository: FakeRepository, what: str, rest: str) -> None:
        if what == "refs":
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
                for name, commit in repository.branches.items()
            ]
            self._answer_json({"branches": branches, "tags": [], "converts": []})
            return
        revision, _, below = rest.partition("/")
        commit = repository.commit_of(revision or "main")
        if commit is None:
            self._refuse(404, "RevisionNotFound", "Revision Not Found")
            return
        files = repository.commits[commit]
        if what == "tree":
            inside = [file for file in files.values() if not below or file.path.startswith(below + "/")]
            self._answer_json([_entry(file) for file in inside])
        elif what == "paths-info":
            wanted = json.loads(self._posted)["paths"] if self._posted[:1] == b"{" else None
            names = wanted if wanted is not None else parse_qs(self._posted.decode()).get("paths", [])
            self._answer_json([_entry(files[name]) for name in names if name in files])
        else:
            self._answer_json(_information(repository, commit))

    def _answer_json(self, value: object) -> None:
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _entry(file: FakeFile) -> dict[str, Any]:
    """Return a file's entry in the API's tree listing."""
    entry: dict[str, Any] = {"type": "file", "oid": file.etag[:40], "size": len(file.content), "path": file.path}
    if file.large:
        entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 135}
    return entry


def _information(repository: FakeRepository, commit: str) -> dict[str, Any]:
    siblings = []
    for file in repository.commits[commit].values():
        sibling: dict[str, Any] = {"rfilename": file.path, "size": len(file.content), "blobId": file.etag[:40]}
        if file.large:
            sibling["lfs"] = {"sha256": file.sha256, "size": len(file.content), "pointerSize": 135}
        siblings.append(sibling)
    return {
        "id": repository.name,
        "modelId": repository.name,
        "sha": commit,
        "private": repository.token is not None,
        "gated": "manual" if repository.gated else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": ["gguf"],
        "siblings": siblings,
    }
