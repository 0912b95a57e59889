"""Downloads for one test, in this process or in a child process, with their folders and recorded output."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import pytest

from llmrun.hub.names import Artifact, HubSource, RemoteFile
from llmrun.hub.remote import huggingface
from tests.support.cli.commands import ROOT
from tests.support.hub.fake_hub import FakeHub, FakeRepository

TOKEN = "hf_secretsecretsecret"
CHILD = """
import json, sys
from llmrun.base.errors import LlmrunError
from llmrun.hub.transfer.download import download
from llmrun.hub.names import Artifact, HubSource, RemoteFile

def say(**what):
    print(json.dumps(what), flush=True)

class Report:
    def note(self, line):
        say(note=line)
    def progress(self, label, done, total):
        say(label=label, done=done, total=total)

told = json.loads(sys.argv[1])
files = tuple(RemoteFile(*file) for file in told["files"])
source = HubSource(told["repository"], files[0].path)
try:
    say(path=str(download(Artifact(told["name"], source, files, told["commit"]), Report())))
except LlmrunError as error:
    say(error=type(error).__name__, message=str(error), hint=error.hint)
"""


@dataclass
class Said:
    """A reporter that records its calls, or the recorded output of a child process."""

    notes: list[str] = field(default_factory=list)
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    path: Path | None = None
    error: str = ""
    message: str = ""
    hint: str = ""

    def note(self, line: str) -> None:
        assert line.isprintable(), line
        self.notes.append(line)

    def progress(self, label: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.steps.append((label, done, total))

    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _, _ in self.steps))


@contextlib.contextmanager
def held_for(lock: Path, seconds: float) -> Iterator[None]:
    """Hold the lock in another thread for this many seconds. To filelock, the thread is like another process."""
    taken = threading.Event()

    def hold() -> None:
        with filelock.FileLock(lock):
            taken.set()
            time.sleep(seconds)

    lock.parent.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(30)
    yield
    thread.join()


def artifact_of(made: FakeRepository, *paths: str, name: str = "tiny") -> Artifact:
    """Return the artifact that `huggingface.pin` would return for these files."""
    held = [made.file(path) for path in paths]
    files = tuple(RemoteFile(file.path, len(file.content), file.sha256) for file in held)
    return Artifact(name, HubSource(made.name, paths[0]), files, made.commit)


@dataclass(frozen=True)
class Folders:
    """A user's folders below `root`, for this process (`use`) or a child process (`start`)."""

    root: Path

    @property
    def models(self) -> Path:
        return self.root / "data" / "models"

    @property
    def cache(self) -> Path:
        return self.root / "hf" / "hub"

    def environment(self, hub: FakeHub) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LLMRUN_"))}
        own = {
            "HOME": str(self.root),
            "LLMRUN_CONFIG": str(self.root / "config.toml"),
            "LLMRUN_DATA_DIR": str(self.root / "data"),
            "HF_HOME": str(self.root / "hf"),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "NO_PROXY": "*",
            "PYTHONPATH": str(ROOT),
        }
        return kept | own

    def use(self, monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> None:
        """Point this process at these folders and this Hub, with timeouts and retry delays short enough for tests."""
        from huggingface_hub import constants

        for name, value in self.environment(hub).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)

        def request(repository: str, commit: str, file: str) -> tuple[str, dict[str, str]]:
            return f"{hub.url}/{repository}/resolve/{commit}/{file}", {"authorization": f"Bearer {TOKEN}"}

        monkeypatch.setattr(huggingface, "request", request)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
        monkeypatch.setattr("llmrun.hub.remote.http_ranges.FIRST_WAIT_S", 0.001)

    def start(self, artifact: Artifact, hub: FakeHub, prelude: str = "") -> subprocess.Popen[str]:
        """Start a child process that downloads the artifact. `prelude` is Python code to run in it first."""
        assert isinstance(artifact.source, HubSource)
        files = [(file.path, file.size, file.sha256) for file in artifact.files]
        told = {"name": artifact.name, "repository": artifact.source.repository, "commit": artifact.commit}
        return subprocess.Popen(
            [sys.executable, "-c", prelude + "\n" + CHILD, json.dumps(told | {"files": files})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(hub),
            cwd=self.root,
        )

    def files(self) -> Iterator[Path]:
        """Yield all files and links in the folders."""
        for folder in (self.root / "data", self.root / "hf"):
            yield from (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file())

    def wrong(self, artifact: Artifact, *, whole: bool) -> list[str]:
        """Return a list of problems with the folders; empty if all is well.

        If `whole`, all files of the model must be in place. Otherwise the model must not be listed yet, and partial
        files with their journals are allowed. Locks, records and the branch are always allowed.
        """
        assert isinstance(artifact.source, HubSource)
        home = self.cache / ("models--" + artifact.source.repository.replace("/", "--"))
        found = []
        links = [home / "snapshots" / artifact.commit / file.path for file in artifact.files]
        for file, link in zip(artifact.files, links, strict=True):
            if whole and (not link.is_file() or hashlib.sha256(link.read_bytes()).hexdigest() != file.sha256):
                found.append(f"{link}: not the file")
            if not whole and os.path.lexists(link) and link == links[0]:
                found.append(f"{link}: listed before the model is whole")
        blobs = {str(file.sha256) for file in artifact.files}
        for path in self.files():
            if path.parent.name == "blobs" and path.name in blobs:
                if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                    found.append(f"{path}: damaged")
            elif path in links or {".locks", ".records"} & set(path.parts) or path.parent.name == "refs":
                continue
            elif whole or not path.name.partition(".")[2].startswith("llmrun.incomplete"):
                found.append(f"{path}: left over")
        return found


def outcome(lines: str) -> Said:
    """Parse a child's output. An incomplete last line is ignored."""
    said = Said()
    for line in lines.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        what = json.loads(line)
        if "note" in what:
            said.note(what["note"])
        elif "label" in what:
            said.progress(what["label"], what["done"], what["total"])
        elif "path" in what:
            said.path = Path(what["path"])
        else:
            said.error, said.message, said.hint = what["error"], what["message"], what["hint"]
    return said
