"""Downloads with dropped connections, killed processes and bad servers, from a local Hub."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.hub.local.safe_writes import CHUNK
from llmrun.hub.names import Artifact
from llmrun.hub.remote.http_ranges import MOST_CONNECTIONS, PROGRESS
from llmrun.hub.transfer.download import download
from tests.soak.driver import Broken, Soak
from tests.soak.driver import Case as SoakCase
from tests.support.hub.fake_hub import FakeHub, Fault, Place, fake_hub
from tests.support.hub.fetching import TOKEN, Folders, Said, artifact_of, outcome

_CUTS = 20
_KILL_SPEED = 2e6  # bytes per second per connection in the kill cases, so that a model takes about a second
# Python code that makes a process use several connections even for a small file.
_SEVERAL = """
import llmrun.hub.remote.http_ranges, llmrun.hub.transfer.file_transfer
llmrun.hub.remote.http_ranges.PROBE_S = llmrun.hub.remote.http_ranges.WORTH_S = 0.05
llmrun.hub.transfer.file_transfer.PART = 100_000
"""
_SHARDS = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


def downloads(soak: Soak) -> Iterator[SoakCase]:
    """Disturb a download in one of three ways per case. Every case has its own Hub and folders."""

    def case(number: int) -> str:
        disturb = _WAYS[number % len(_WAYS)]
        with tempfile.TemporaryDirectory() as folder, fake_hub() as hub, pytest.MonkeyPatch.context() as patch:
            folders = Folders(Path(folder))
            folders.use(patch, hub)
            return disturb(Case(soak.random(number), hub, folders, soak.counts))

    yield case


def cut(case: Case) -> str:
    """Drop connections after random numbers of bytes. At most one chunk may be sent again after each."""
    model = case.model()
    for _ in range(_CUTS):
        # Shorter answers do not count as progress, and a download rightly gives up after several of those.
        case.hub.faults.append(Fault(cut_after=case.rng.randrange(PROGRESS + 1, 250_000)))
    download(model, Said())
    case.require_folders(model, whole=True)
    case.require_sent_once(model, _CUTS - len(case.hub.faults))
    return "cut"


def kill(case: Case) -> str:
    """Kill processes at random moments until one finishes. Each process must resume where the last one stopped."""
    model = case.model()
    case.hub.bytes_per_second = _KILL_SPEED
    kills, several = 0, case.rng.random() < 0.5
    while True:
        process = case.folders.start(model, case.hub, _SEVERAL if several else "")
        requests = case.hub.started()
        # Half of the kills come during the transfer, the others at any time from the first import to the last link.
        in_transfer = case.rng.random() < 0.5
        if in_transfer:
            while case.hub.started() == requests and process.poll() is None:
                time.sleep(0.002)
        try:
            out, complaints = process.communicate(timeout=case.rng.uniform(0.0, 0.4 if in_transfer else 1.5))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            link = case.folders.cache / "models--org--repo" / "snapshots" / model.commit / model.files[0].path
            if not os.path.lexists(link):
                case.require_folders(model, whole=False)
        else:
            break
    said = outcome(out)
    if process.returncode or complaints or said.path is None or said.path.name != Path(model.files[0].path).name:
        raise Broken(f"exit code {process.returncode}: {said.error} {said.message} {complaints[-300:]}")
    case.require_folders(model, whole=True)
    # When several connections are used, some are closed early, which wastes the bytes in flight.
    case.require_sent_once(model, kills + MOST_CONNECTIONS * several)
    case.counts["kills"] += kills
    return "killed"


def lie(case: Case) -> str:
    """Use a server that stalls and lies.

    The download ends with the complete model or with an error in one line, and then a second download completes it.
    """
    model, said = case.model(), Said()
    for _ in range(case.rng.randrange(1, 9)):
        case.hub.faults.append(case.fault(model.files[0].size))
    how = "whole in spite of lies"
    try:
        download(model, said)
    except LlmrunError as error:
        if TOKEN in str(error) + error.hint or not str(error).isprintable():
            raise Broken(f"an error with the token or unprintable characters: {error!r}") from error
        case.require_folders(model, whole=False)
        how = f"lies that ended in {type(error).__name__}"
    case.hub.faults.clear()
    download(model, said)
    case.require_folders(model, whole=True)
    if TOKEN in "".join(said.notes):
        raise Broken("a note contains the token")
    return how


# The cases take turns. Only one in five kills processes, because that takes seconds.
_WAYS: tuple[Callable[[Case], str], ...] = (lie, cut, lie, kill, lie)


@dataclass
class Case:
    """The Hub and the folders of a case, its random numbers, and the checks that the cases share."""

    rng: random.Random
    hub: FakeHub
    folders: Folders
    counts: Counter[str]

    def model(self) -> Artifact:
        """Add a model of one file or two shards, one to three megabytes in total."""
        names = _SHARDS if self.rng.random() < 0.3 else ("model.gguf",)
        files = {f"sub/{name}": b"GGUF" + self.rng.randbytes(self.rng.randrange(1 << 20, 2_500_000)) for name in names}
        return artifact_of(self.hub.add("org/repo", files), *files)

    def fault(self, size: int) -> Fault:
        """Return a random server error."""
        pick, at = self.rng.choice, self.rng.randrange(size)
        on: Place = "hub" if self.rng.random() < 0.5 else "storage"
        etag = pick(('"other"', 'W/"weak"', "", '"\x7f"', '"' + "e" * 999 + '"'))
        length = str(pick((0, 1, size - 1, size + 1, 10**18)))
        span = pick((f"0-{size - 1}/{size}", f"5-9/{size}", "*/*", f"0-9/{size + 1}", "nonsense"))
        closing = {"Content-Length": "", "Connection": "close"}
        fault = pick(
            (
                Fault(cut_after=at),
                Fault(cut_after=at, first=self.hub.expire),
                Fault(stall_after=at),
                Fault(ignore_range=True),
                Fault(ignore_range=True, cut_after=at),
                Fault(ignore_range=True, headers=closing, alter=lambda body: body + b"more"),
                Fault(headers={"Content-Length": length, "Connection": "close"}),
                Fault(headers={"Content-Range": f"bytes {span}"}),
                Fault(headers={"ETag": etag}, cut_after=at),
                Fault(headers={"Content-Encoding": "gzip"}),
                Fault(alter=lambda body: body[:at] + bytes(byte ^ 1 for byte in body[at : at + 1]) + body[at + 1 :]),
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

    def require_sent_once(self, model: Artifact, broken: int) -> None:
        """Check that at most one chunk per broken connection was sent twice, and nothing if none broke."""
        twice = self.hub.sent() - model.size
        if not 0 <= twice <= broken * CHUNK:
            raise Broken(f"{twice:,} bytes sent twice, {broken} connections broken")

    def require_folders(self, model: Artifact, *, whole: bool) -> None:
        """Check that the model is whole, or that it is not listed yet. The storage must never get the token."""
        if wrong := self.folders.wrong(model, whole=whole):
            raise Broken("; ".join(wrong))
        if {asked.authorization for asked in self.hub.asked if asked.at == "storage"} - {""}:
            raise Broken("the storage was given the token")
