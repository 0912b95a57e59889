"""Thousands of downloads with dropped connections, killed processes, bad servers, rivals and full disks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmrun.errors import DoesNotFit, LlmrunError
from llmrun.hub.local import safe_writes
from llmrun.hub.local.safe_writes import CHUNK
from llmrun.hub.names.model_sources import Artifact
from llmrun.hub.remote.backoff import MOST_CONNECTIONS, PROGRESS
from llmrun.hub.transfer.download import download
from tests.support.hub.fake_hub import FakeHub, Fault, Place, fake_hub
from tests.support.hub.fetching import TOKEN, Folders, Said, artifact_of, outcome
from tests.support.hub.small_disks import small_disk

RIVALS = 8
_TIMEOUT_S = 120.0  # for a stuck process
_KILL_SPEED = 2e6  # bytes per second per connection in the kill cases, so that a model takes about a second
# Python code that makes a process use several connections even for a small file.
_SEVERAL = """
import llmrun.hub.remote.backoff, llmrun.hub.transfer.connections
llmrun.hub.remote.backoff.PROBE_S = llmrun.hub.remote.backoff.WORTH_S = 0.05
llmrun.hub.transfer.connections.PART = 100_000
"""
_SHARDS = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


class Finding(Exception):
    """An unexpected outcome."""


@dataclass
class Tally:
    """How often each kind of case succeeded, and a sentence for each failure."""

    done: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    most_sent_twice: int = 0  # bytes per broken connection

    def count(self, what: str, number: int = 1) -> None:
        self.done[what] = self.done.get(what, 0) + number


@dataclass
class Soak:
    """A soak of downloads. Every case has its own Hub and folders, and `seed` and `case` reproduce it exactly."""

    seed: int
    tally: Tally = field(default_factory=Tally)

    def run(self, what: str, case: int) -> None:
        """Run one case of `cuts`, `kills`, `lies`, `rivals` or `disk`. A failure is recorded as a finding."""
        rng = random.Random(f"{self.seed} {what} {case}")
        doing: Callable[[_Case], None] = getattr(self, f"_{what}")
        with tempfile.TemporaryDirectory() as folder, fake_hub() as hub, pytest.MonkeyPatch.context() as patch:
            try:
                doing(_Case(rng, hub, Folders(Path(folder)), patch))
            except (Finding, AssertionError, LlmrunError, OSError) as error:
                self.tally.findings.append(f"{what} {case}: {type(error).__name__}: {error}")
            else:
                self.tally.count(what)

    # --- kinds of cases -----------------------------------------------------------------------------------------------

    def _cuts(self, case: _Case) -> None:
        """Drop twenty connections after random numbers of bytes. Nothing may be sent twice."""
        model = case.model()
        case.use()
        cuts = 20
        for _ in range(cuts):
            # Shorter answers do not count as progress, and a download rightly gives up after several of those.
            case.hub.faults.append(Fault(cut_after=case.rng.randrange(PROGRESS + 1, 250_000)))
        download(model, Said())
        case.require_whole(model)
        used = cuts - len(case.hub.faults)
        self._require_sent_once(case, model, used)
        self.tally.count("connections cut", used)

    def _kills(self, case: _Case) -> None:
        """Kill processes at random moments until one finishes. Each process must resume where the last one stopped."""
        model = case.model()
        case.hub.bytes_per_second = _KILL_SPEED
        kills, several = 0, case.rng.random() < 0.5
        while True:
            process = case.folders.start(model, case.hub, _SEVERAL if several else "")
            began = time.monotonic()
            # Half of the kills come during the transfer, the others at any time from the first import to the last link.
            downloads = case.hub.started()
            patience = case.rng.uniform(0.0, 0.4)
            if case.rng.random() < 0.5:
                while (
                    case.hub.started() == downloads and process.poll() is None and time.monotonic() - began < _TIMEOUT_S
                ):
                    time.sleep(0.002)
            else:
                patience = case.rng.uniform(0.0, 1.5)
            try:
                out, complaints = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
                if not case.is_listed(model):
                    case.require_nothing_listed(model)
                continue
            case.require_path(process.returncode, out, complaints, model)
            break
        case.require_whole(model)
        # When several connections are used, some are closed early, which wastes the bytes in flight.
        self._require_sent_once(case, model, kills + MOST_CONNECTIONS * several)
        self.tally.count("processes killed", kills)

    def _lies(self, case: _Case) -> None:
        """Use a server that stalls and lies. The result is the model or a one-line error, and the model once the server
        recovers."""
        model = case.model()
        case.use()
        for _ in range(case.rng.randrange(1, 9)):
            case.hub.faults.append(case.fault(model.files[0].size))
        said = Said()
        try:
            download(model, said)
            self.tally.count("models in spite of lies")
        except LlmrunError as error:
            if TOKEN in str(error) + error.hint or not str(error).isprintable():
                raise Finding(f"not fit to be told: {error!r}") from error
            case.require_nothing_listed(model)
            self.tally.count(f"lies that ended in {type(error).__name__}")
        case.hub.faults.clear()
        download(model, said)
        case.require_whole(model)
        if TOKEN in "".join(said.notes):
            raise Finding("the token was told")

    def _rivals(self, case: _Case) -> None:
        """Let eight processes pull one model at once, and sometimes kill one. Each byte must be fetched by only one of
        them."""
        if sys.platform == "win32":
            raise NotImplementedError("needs POSIX signals")
        model = case.model(shards=2)
        case.hub.bytes_per_second = 4 * _KILL_SPEED
        processes = [case.folders.start(model, case.hub) for _ in range(RIVALS)]
        kills = case.rng.randrange(2)
        if kills:
            time.sleep(case.rng.uniform(0.3, 3.0))
            kills = int(processes[0].poll() is None)
            processes[0].send_signal(signal.SIGKILL)
        for number, process in enumerate(processes):
            out, complaints = process.communicate(timeout=_TIMEOUT_S)
            if number > 0 or process.returncode != -signal.SIGKILL:
                case.require_path(process.returncode, out, complaints, model)
        case.require_whole(model)
        self._require_sent_once(case, model, kills)
        self.tally.count("processes at once", RIVALS)
        self.tally.count("of them killed", kills)

    def _disk(self, case: _Case) -> None:
        """Fill the disk in the middle of a download. Once there is room, the download must resume."""
        model = case.model()
        case.use()
        # The check for free space passes, as if another program filled the disk afterwards.
        case.patch.setattr(safe_writes, "SPARE", -(1 << 40))
        case.hub.bytes_per_second = 2e7  # low, because the bytes in flight when the disk fills up are lost
        size = model.files[0].size
        with small_disk(case.folders.root / "small", case.rng.randrange(200_000, size), case.patch) as small:
            inner = Folders(small.folder / "home")
            inner.root.mkdir()
            inner.use(case.patch, case.hub)
            full = _Case(case.rng, case.hub, inner, case.patch)
            try:
                download(model, Said())
            except DoesNotFit:
                full.require_nothing_listed(model)
                self.tally.count("full disks")
            small.make_room()
            download(model, Said())
            full.require_whole(model)
        self._require_sent_once(case, model, 1)

    def _require_sent_once(self, case: _Case, model: Artifact, broken: int) -> None:
        """Check that at most one chunk per broken connection was sent twice, and nothing if none broke."""
        twice = case.hub.sent() - model.size
        self.tally.most_sent_twice = max(self.tally.most_sent_twice, twice // max(1, broken))
        if not 0 <= twice <= broken * CHUNK:
            raise Finding(f"{twice:,} bytes sent twice, {broken} connections broken")


@dataclass
class _Case:
    rng: random.Random
    hub: FakeHub
    folders: Folders
    patch: pytest.MonkeyPatch

    def use(self) -> None:
        self.folders.use(self.patch, self.hub)

    def model(self, shards: int = 0) -> Artifact:
        """Add a model of one file or two shards, one to three megabytes in total."""
        names = _SHARDS if shards or self.rng.random() < 0.3 else ("model.gguf",)
        files = {f"sub/{name}": b"GGUF" + self.rng.randbytes(self.rng.randrange(1 << 20, 2_500_000)) for name in names}
        return artifact_of(self.hub.add("org/repo", files), *files)

    def fault(self, size: int) -> Fault:
        """Return a random server error."""
        pick, at = self.rng.choice, self.rng.randrange(size)
        on: Place = "hub" if self.rng.random() < 0.5 else "storage"
        etag = pick(('"other"', 'W/"weak"', "", '"\x7f"', '"' + "e" * 999 + '"'))
        length = str(pick((0, 1, size - 1, size + 1, 10**18)))
        span = pick((f"0-{size - 1}/{size}", f"5-9/{size}", "*/*", f"0-9/{size + 1}", "nonsense"))
        fault = pick(
            (
                Fault(cut_after=at),
                Fault(cut_after=at, first=self.hub.expire),
                Fault(stall_after=at),
                Fault(ignore_range=True),
                Fault(ignore_range=True, cut_after=at),
                Fault(ignore_range=True, headers={"Content-Length": "", "Connection": "close"}, alter=longer),
                Fault(headers={"Content-Length": length, "Connection": "close"}),
                Fault(headers={"Content-Range": f"bytes {span}"}),
                Fault(headers={"ETag": etag}, cut_after=at),
                Fault(headers={"Content-Encoding": "gzip"}),
                Fault(alter=flipping(at)),
                Fault(on="hub", headers={"X-Linked-Etag": f'"{"0" * 64}"'}),
                Fault(on="hub", headers={"Location": pick(("/x", "//[", "http://127.0.0.1:9/", "gopher://x"))}),
                Fault(on=on, status=pick((401, 403, 404, 410, 416, 418))),
                Fault(
                    on=on, status=pick((408, 429, 500, 503)), headers={"Retry-After": pick(("0", "", "soon", "9999"))}
                ),
            )
        )
        if fault.stall_after is None:
            fault.times = pick((1, 1, 1, 2, 9))
        return fault

    # --- checks -------------------------------------------------------------------------------------------------------

    def is_listed(self, model: Artifact) -> bool:
        home = self.folders.cache / "models--org--repo"
        return os.path.lexists(home / "snapshots" / model.commit / model.files[0].path)

    def require_whole(self, model: Artifact) -> None:
        if wrong := self.folders.wrong(model, whole=True):
            raise Finding("; ".join(wrong))
        if {asked.authorization for asked in self.hub.asked if asked.at == "storage"} - {""}:
            raise Finding("the storage was given the token")

    def require_nothing_listed(self, model: Artifact) -> None:
        if wrong := self.folders.wrong(model, whole=False):
            raise Finding("; ".join(wrong))

    def require_path(self, code: int | None, out: str, complaints: str, model: Artifact) -> None:
        said = outcome(out)
        if code != 0 or complaints or said.path is None or not said.path.name.endswith(Path(model.files[0].path).name):
            raise Finding(f"exit code {code}: {said.error} {said.message} {complaints[-300:]}")


def longer(body: bytes) -> bytes:
    return body + b"more"


def flipping(position: int) -> Callable[[bytes], bytes]:
    """Return a function that flips one bit of the byte at this position, if there is one."""

    def flip(body: bytes) -> bytes:
        changed = bytearray(body)
        for byte in range(position, min(position + 1, len(changed))):
            changed[byte] ^= 1
        return bytes(changed)

    return flip
