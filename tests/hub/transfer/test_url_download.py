"""Tests of models on plain web servers: resumed when the server sends a version, and never mixed with another file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmrun.base.errors import IntegrityError, LlmrunError, NetworkError
from llmrun.hub.local import model_records, paths
from llmrun.hub.local.safe_writes import alone_with
from llmrun.hub.names import Expected, UrlSource
from llmrun.hub.remote.http_ranges import pin
from llmrun.hub.transfer.download import download
from llmrun.hub.transfer.partial_file import journal_of
from llmrun.hub.upkeep.removal import partials
from tests.support.hub.fake_hub import HALF, MODEL, SHA256, FakeFile, FakeHub, Fault, fake_hub
from tests.support.hub.fetching import Folders, Said

OTHER = MODEL[:4] + MODEL[:3:-1]
PAGE = b"<!DOCTYPE html>" + bytes(5000)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Folders:
    made = Folders(tmp_path)
    made.use(monkeypatch, hub)
    return made


@pytest.fixture
def said() -> Said:
    return Said()


def left_over(folders: Folders) -> list[str]:
    return [path.name for path in folders.files() if not {".locks", ".records"} & set(path.parts)]


def broken_off(hub: FakeHub, url: str, fault: Fault) -> None:
    """Run a download that receives only the first half."""
    hub.faults += [fault, Fault(status=404, times=2)]
    with pytest.raises(LlmrunError):
        download(pin(UrlSource(url), (), name="it"), Said())
    hub.faults.clear()


def test_a_file_lies_in_our_folder_under_its_name(folders: Folders, hub: FakeHub, said: Said) -> None:
    source = UrlSource(hub.public(MODEL))
    path = download(pin(source, (), name="it"), said)
    assert path == paths.web_file(source.url, "model.gguf")
    assert path.is_relative_to(folders.models)
    assert path.read_bytes() == MODEL
    assert left_over(folders) == ["model.gguf"]
    record = model_records.read_record(path)
    assert record is not None
    assert (record.source, record.files[0].sha256) == (source.url, SHA256)
    again = download(pin(source, (), name="it"), said)
    assert again == path
    assert hub.downloads() == 1


def test_two_addresses_with_the_same_file_name_do_not_collide(hub: FakeHub, said: Said) -> None:
    one, two = (download(pin(UrlSource(hub.public(data)), (), name="it"), said) for data in (MODEL, OTHER))
    assert one.name == two.name
    assert (one.read_bytes(), two.read_bytes()) == (MODEL, OTHER)


def test_it_is_gone_on_with_by_a_later_run(folders: Folders, hub: FakeHub, said: Said) -> None:
    url = hub.public(MODEL)
    broken_off(hub, url, Fault(cut_after=HALF, skip=1))
    assert download(pin(UrlSource(url), (), name="it"), said).read_bytes() == MODEL
    assert hub.asked[-1].range == f"bytes={HALF}-{len(MODEL) - 1}"
    assert left_over(folders) == ["model.gguf"]


def test_one_that_changed_meanwhile_is_begun_anew(folders: Folders, hub: FakeHub, said: Said) -> None:
    url = hub.public(MODEL)
    broken_off(hub, url, Fault(cut_after=HALF, skip=1))
    changed = FakeFile("model.gguf", OTHER)
    hub.objects[SHA256] = changed
    path = download(pin(UrlSource(url), (), name="it"), said)
    assert path.read_bytes() == OTHER
    assert left_over(folders) == ["model.gguf"]


def test_one_whose_version_has_no_name_is_begun_anew(hub: FakeHub, said: Said) -> None:
    url = hub.public(MODEL)
    broken_off(hub, url, Fault(cut_after=HALF, skip=1, headers={"ETag": ""}))
    assert download(pin(UrlSource(url), (), name="it"), said).read_bytes() == MODEL
    assert hub.asked[-1].range == f"bytes=0-{len(MODEL) - 1}"


def test_one_that_is_of_another_size_while_it_comes_is_an_error(folders: Folders, hub: FakeHub, said: Said) -> None:
    url = hub.public(MODEL)
    artifact = pin(UrlSource(url), (), name="it")
    hub.objects[SHA256] = FakeFile("model.gguf", MODEL[:-1])
    with pytest.raises(IntegrityError, match=r"the server's file is 2,500,003 bytes, expected 2,500,004$"):
        download(artifact, said)
    assert left_over(folders) == []


def test_a_page_is_not_taken_for_a_model(folders: Folders, hub: FakeHub, said: Said) -> None:
    artifact = pin(UrlSource(hub.public(PAGE)), (), name="it")
    with pytest.raises(IntegrityError, match="not a GGUF file; nothing was kept"):
        download(artifact, said)
    assert left_over(folders) == []


def test_a_proxys_page_costs_nothing_that_is_here(folders: Folders, hub: FakeHub, said: Said) -> None:
    url = hub.public(MODEL)
    artifact = pin(UrlSource(url), (), name="it")
    broken_off(hub, url, Fault(cut_after=HALF, skip=1))
    page = Fault(
        ignore_range=True, alter=lambda _: PAGE, headers={"Content-Length": "", "ETag": "", "Connection": "close"}
    )
    hub.faults += [Fault(**vars(page)), Fault(**vars(page))]
    with pytest.raises(
        IntegrityError, match="the response is not a GGUF file; keeping the 1,250,002 bytes received before"
    ):
        download(artifact, said)
    assert download(artifact, said).read_bytes() == MODEL
    assert hub.asked[-1].range == f"bytes={HALF}-{len(MODEL) - 1}"


def test_rm_and_prune_find_a_running_download_in_use(folders: Folders, hub: FakeHub, said: Said) -> None:
    artifact = pin(UrlSource(hub.public(MODEL, "m-00001-of-00002.gguf")), (), name="it")
    busy: list[set[str]] = []
    seen: list[bool] = []

    def look(body: bytes) -> bytes:
        begun = partials()
        seen.append(all(journal_of(partial.files[0]).exists() and partial.total == len(MODEL) for partial in begun))
        busy.append({path.name for partial in begun for path in partial.files if is_busy(path)})
        return body

    hub.faults.append(Fault(alter=look, times=2))
    download(artifact, said)
    first, second = (f"m-0000{number}-of-00002.gguf.llmrun.incomplete" for number in (1, 2))
    assert busy == [{first}, {first, second}]
    assert seen == [True, True]


def is_busy(path: Path) -> bool:
    with alone_with([path]) as busy:
        return busy is not None


@pytest.mark.parametrize("file", ["model.gguf", "m-00001-of-00002.gguf"])
def test_one_that_vanished_when_it_was_whole_is_one_sentence(
    folders: Folders, hub: FakeHub, said: Said, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    artifact = pin(UrlSource(hub.public(MODEL, file)), (), name="it")

    def gone(partial: Path) -> ExitStack:
        partial.unlink()
        return ExitStack()

    monkeypatch.setattr("llmrun.hub.transfer.download.in_use", gone)
    with pytest.raises(LlmrunError, match="incomplete: another program removed files during the download"):
        download(artifact, said)


def test_a_sha256_that_is_known_is_held(folders: Folders, hub: FakeHub, said: Said) -> None:
    url = hub.public(MODEL)
    right, wrong = Expected("model.gguf", len(MODEL), SHA256), Expected("model.gguf", None, "0" * 64)
    with pytest.raises(IntegrityError, match=r"expected .*; nothing was kept"):
        download(pin(UrlSource(url), (wrong,), name="it"), said)
    assert left_over(folders) == []
    with pytest.raises(IntegrityError, match="expected 7"):
        pin(UrlSource(url), (Expected("model.gguf", 7),), name="it")
    path = download(pin(UrlSource(url), (right,), name="it"), said)
    path.write_bytes(OTHER)
    os.utime(path, (1, 1))
    assert download(pin(UrlSource(url), (right,), name="it"), said).read_bytes() == MODEL


def test_shards_are_there_when_all_of_them_are(folders: Folders, hub: FakeHub, said: Said) -> None:
    # The storage serves by the sha256 in the path, not by the name, so shards with equal bytes work as well.
    url = hub.public(MODEL, "m-00001-of-00002.gguf")
    artifact = pin(UrlSource(url), (), name="it")
    assert [file.path for file in artifact.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    hub.faults.append(Fault(status=500, times=99, skip=1))
    with pytest.raises(NetworkError):
        download(artifact, said)
    assert not list(folders.models.rglob("*.gguf"))
    hub.faults.clear()
    path = download(artifact, said)
    assert [other.name for other in sorted(path.parent.iterdir())] == [file.path for file in artifact.files]
    # one success, six failures, and the other file: received bytes were not requested again
    assert hub.downloads() == 8
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def test_killed_between_its_name_and_the_end_it_is_not_fetched_again(
    folders: Folders, hub: FakeHub, said: Said
) -> None:
    artifact = pin(UrlSource(hub.public(MODEL)), (), name="it")
    path = download(artifact, said)
    journal = path.with_name(path.name + paths.PARTIAL + ".journal")
    journal.write_text("left over")
    model_records.record_path(path).unlink()
    assert download(artifact, said) == path
    assert hub.downloads() == 1
    assert left_over(folders) == ["model.gguf"]
    assert said.labels() == ["downloading it", "checking it"]
