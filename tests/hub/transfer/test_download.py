"""Tests of downloads from the Hub: right bytes in the shared cache or one sentence, and resuming."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmrun.base.errors import DoesNotFit, IntegrityError, LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.local import model_records, paths, safe_writes
from llmrun.hub.names import Artifact, HubSource
from llmrun.hub.transfer import download as download_module
from llmrun.hub.transfer.download import download
from llmrun.hub.transfer.partial_file import PartialFile
from tests.support.hub.fake_hub import HALF, MODEL, SHA256, Asked, FakeHub, Fault, fake_hub
from tests.support.hub.fetching import TOKEN, Folders, Said, artifact_of, held_for
from tests.support.hub.small_disks import SmallDisk

SHARDS = {f"big/model-0000{number}-of-00003.gguf": b"GGUF" + MODEL[number * 1000 :] for number in (1, 2, 3)}


@dataclass(frozen=True)
class Usage:
    """The part of shutil's disk usage that is needed."""

    free: int


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.add("org/repo", {"sub/model.gguf": MODEL, "README.md": b"# hello"})
        running.add("org/shards", SHARDS)
        yield running


@pytest.fixture
def folders(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Folders:
    made = Folders(tmp_path)
    made.use(monkeypatch, hub)
    return made


@pytest.fixture
def model(hub: FakeHub) -> Artifact:
    return artifact_of(hub.repositories["org/repo"], "sub/model.gguf")


@pytest.fixture
def shards(hub: FakeHub) -> Artifact:
    return artifact_of(hub.repositories["org/shards"], *SHARDS)


@pytest.fixture
def said() -> Said:
    return Said()


def of_storage(hub: FakeHub) -> list[Asked]:
    return [asked for asked in hub.asked if asked.at == "storage"]


def then(action: Callable[[], object]) -> Callable[[bytes], bytes]:
    """Return a filter that calls `action` when the response begins and keeps the body."""

    def run(body: bytes) -> bytes:
        action()
        return body

    return run


def ranges(hub: FakeHub) -> list[str]:
    return [asked.range for asked in of_storage(hub)]


# --- storing files ----------------------------------------------------------------------------------------------------


@pytest.mark.push
def test_a_file_lands_in_the_shared_cache_as_other_tools_expect_it(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    path = download(model, said)
    home = folders.cache / "models--org--repo"
    assert path == home / "snapshots" / model.commit / "sub" / "model.gguf"
    assert path.read_bytes() == MODEL
    assert path.is_symlink()
    assert not path.readlink().is_absolute()
    assert path.resolve() == home / "blobs" / SHA256
    assert (home / "refs" / "main").read_text() == model.commit
    assert folders.wrong(model, whole=True) == []
    assert said.notes == []
    # huggingface_hub itself checks the layout, without any network.
    code = "import huggingface_hub as h; print(h.hf_hub_download('org/repo', 'sub/model.gguf', local_files_only=True))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=folders.environment(hub), capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == path


def test_the_record_says_what_was_fetched_and_from_where(folders: Folders, model: Artifact, said: Said) -> None:
    path = download(model, said)
    record = model_records.read_record(path)
    assert record is not None
    assert (record.name, record.source, record.commit) == ("tiny", "hf:org/repo/sub/model.gguf", model.commit)
    assert [(file.path, file.size, file.sha256) for file in record.files] == [(str(path), len(MODEL), SHA256)]
    assert model_records.known_digest(path) == SHA256


@pytest.mark.push
def test_a_model_in_shards_is_there_when_all_of_it_is(
    folders: Folders, hub: FakeHub, shards: Artifact, said: Said
) -> None:
    hub.faults.append(Fault(status=404, skip=2))
    with pytest.raises(ModelNotFound):
        download(shards, said)
    assert folders.wrong(shards, whole=False) == []
    assert not list(folders.cache.rglob("*.gguf"))
    path = download(shards, said)
    assert path.name == "model-00001-of-00003.gguf"
    assert folders.wrong(shards, whole=True) == []
    assert hub.sent() == shards.size
    assert said.labels() == [f"downloading tiny ({number} of 3)" for number in (1, 2, 3)]
    record = model_records.read_record(path)
    assert record is not None
    assert [file.sha256 for file in record.files] == [file.sha256 for file in shards.files]


def test_progress_counts_every_byte_once(folders: Folders, model: Artifact, said: Said) -> None:
    download(model, said)
    done = [step[1] for step in said.steps]
    assert done == sorted(set(done))
    assert done[-1] == len(MODEL)
    assert said.labels() == ["downloading tiny"]


def test_a_blob_that_only_lacks_its_link_is_not_fetched_again(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    path = download(model, said)
    path.unlink()
    said.steps.clear()
    assert download(model, said) == path
    assert (hub.downloads(), said.steps) == (1, [])
    # Without a record, the file is read once to verify it.
    path.unlink()
    model_records.record_path(path.parent / "gone").parent.rename(folders.root / "forgotten")
    assert download(model, said) == path
    assert hub.downloads() == 1
    assert said.labels() == ["checking tiny"]


@pytest.mark.parametrize("damaged", [MODEL[:-1] + b"?", MODEL[:-1]])
def test_a_damaged_blob_is_replaced(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, damaged: bytes
) -> None:
    blob = paths.blob("org/repo", SHA256)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(damaged)
    assert download(model, said).read_bytes() == MODEL
    assert folders.wrong(model, whole=True) == []
    assert ["damaged: sha256" in note for note in said.notes] == [True] * (len(damaged) == len(MODEL))


@pytest.mark.push
def test_without_symbolic_links_the_file_itself_is_in_the_snapshot(
    folders: Folders, hub: FakeHub, shards: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    path = download(shards, said)
    assert not path.is_symlink()
    assert folders.wrong(shards, whole=True) == []
    assert download(shards, said) == path
    assert hub.downloads() == 3


def test_a_second_model_of_the_same_bytes_in_another_commit_is_linked(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    download(model, said)
    made = hub.add("org/repo", {"renamed.gguf": MODEL})
    second = artifact_of(made, "renamed.gguf")
    assert download(second, said).resolve() == paths.blob("org/repo", SHA256)
    assert hub.downloads() == 1
    assert (folders.cache / "models--org--repo" / "refs" / "main").read_text() == second.commit


def test_a_commit_that_was_asked_for_by_its_name_moves_no_branch(folders: Folders, model: Artifact, said: Said) -> None:
    assert isinstance(model.source, HubSource)
    path = download(replace(model, source=replace(model.source, revision=model.commit)), said)
    assert path.read_bytes() == MODEL
    assert not (folders.cache / "models--org--repo" / "refs").exists()


@pytest.mark.push
def test_another_process_is_waited_for_with_one_line(folders: Folders, hub: FakeHub, model: Artifact) -> None:
    said = Said()
    with held_for(paths.lock_file(SHA256), 0.2), held_for(paths.shared_lock("org/repo", SHA256), 0.5):
        assert download(model, said).read_bytes() == MODEL
    assert said.notes == ["tiny: waiting for another process's download"]


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_cut_connection_is_gone_on_with(folders: Folders, hub: FakeHub, model: Artifact, said: Said) -> None:
    cuts = [100_000, 1, 1_000_000]
    hub.faults += [Fault(cut_after=cut) for cut in cuts]
    assert download(model, said).read_bytes() == MODEL
    assert ranges(hub) == [f"bytes={start}-{len(MODEL) - 1}" for start in (0, 100_000, 100_001, 1_100_001)]
    assert hub.sent() == len(MODEL)
    assert said.notes == []


def test_a_later_run_goes_on_where_an_earlier_one_stopped(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    hub.faults += [Fault(cut_after=HALF), Fault(on="hub", status=403, skip=1)]
    with pytest.raises(NetworkError, match="HTTP 403"):
        download(model, said)
    assert folders.wrong(model, whole=False) == []
    assert paths.partial_of(paths.blob("org/repo", SHA256)).stat().st_size == HALF
    said.steps.clear()
    assert download(model, said).read_bytes() == MODEL
    assert said.steps[0][1] >= HALF
    assert hub.sent() == len(MODEL)
    assert of_storage(hub)[-1].if_range == ""  # the sha256 identifies the content better than an ETag
    assert folders.wrong(model, whole=True) == []


@pytest.mark.push
def test_silence_is_ended_and_gone_on_from(folders: Folders, hub: FakeHub, model: Artifact, said: Said) -> None:
    hub.faults.append(Fault(stall_after=HALF))
    assert download(model, said).read_bytes() == MODEL
    assert ranges(hub)[-1] == f"bytes={HALF}-{len(MODEL) - 1}"


def test_after_a_broken_connection_the_hub_is_asked_where_the_file_is_now(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    hub.faults.append(Fault(cut_after=HALF, alter=then(hub.expire)))
    assert download(model, said).read_bytes() == MODEL
    assert [(asked.at, asked.status) for asked in hub.asked] == [
        ("hub", 302),
        ("storage", 206),
        ("hub", 302),
        ("storage", 206),
    ]
    assert hub.sent() == len(MODEL)


@pytest.mark.parametrize(
    "lie",
    [
        Fault(ignore_range=True, alter=lambda _: b"<html>", headers={"Content-Length": "6"}, times=2),
        Fault(status=416, times=2),
        Fault(headers={"Content-Range": f"bytes {HALF}-{len(MODEL) - 1}/99"}, times=2),
        Fault(on="hub", headers={"X-Linked-Etag": f'"{"f" * 64}"'}, times=2, skip=1),
    ],
)
def test_an_answer_that_speaks_of_another_file_costs_nothing_that_is_here(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, lie: Fault
) -> None:
    hub.faults += [Fault(cut_after=HALF), Fault(**vars(lie))]
    with pytest.raises(IntegrityError, match=rf"; keeping the {HALF:,} bytes received before$") as caught:
        download(model, said)
    assert type(caught.value) is IntegrityError
    assert hub.faults == []
    assert [note.partition(";")[2] for note in said.notes] == [" trying once more"]
    assert paths.partial_of(paths.blob("org/repo", SHA256)).stat().st_size == HALF
    assert download(model, said).read_bytes() == MODEL
    assert ranges(hub)[-1] == f"bytes={HALF}-{len(MODEL) - 1}"


def test_such_answers_with_progress_between_them_do_not_end_a_download(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    hub.faults += [Fault(status=416), Fault(cut_after=HALF), Fault(status=416), Fault(cut_after=HALF // 2)]
    hub.faults.append(Fault(status=416))
    assert download(model, said).read_bytes() == MODEL
    assert (hub.faults, hub.sent()) == ([], len(MODEL))


def test_a_page_without_a_length_is_read_past_and_costs_nothing(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    page = Fault(
        ignore_range=True, alter=lambda _: b"<html>", headers={"Content-Length": "", "Connection": "close"}, times=3
    )
    hub.faults += [Fault(cut_after=HALF), page]
    assert download(model, said).read_bytes() == MODEL
    assert ranges(hub)[-1] == f"bytes={HALF}-{len(MODEL) - 1}"


def test_a_server_that_sends_the_whole_again_is_read_past_what_is_here(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    hub.faults += [Fault(cut_after=HALF), Fault(ignore_range=True, alter=lambda body: bytes(HALF) + body[HALF:])]
    assert download(model, said).read_bytes() == MODEL


def test_a_version_with_another_name_is_gone_on_with_where_the_sha256_decides(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    hub.faults += [Fault(cut_after=HALF), Fault(headers={"ETag": '"moved"'})]
    assert download(model, said).read_bytes() == MODEL
    assert hub.sent() == len(MODEL)


# --- concurrent removal -----------------------------------------------------------------------------------------------


def removing(monkeypatch: pytest.MonkeyPatch, blob: Path, times: int) -> None:
    """Simulate another process that removes the blob `times` times, just before the links are created."""
    put, left = download_module._is_present, [times]

    def first(goal: object) -> bool:
        if goal.final == blob and left[0] and blob.exists():  # type: ignore[attr-defined]
            left[0] -= 1
            blob.unlink()
        return put(goal)  # type: ignore[arg-type]

    monkeypatch.setattr(download_module, "_is_present", first)


def test_what_was_removed_before_its_link_was_put_is_fetched_again(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(model, said).unlink()
    removing(monkeypatch, paths.blob("org/repo", SHA256), 2)
    monkeypatch.setattr(download_module, "require_space", lambda *_: None)
    assert download(model, said).read_bytes() == MODEL
    assert hub.downloads() == 3
    assert folders.wrong(model, whole=True) == []


def test_what_is_always_removed_is_one_sentence(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "require_space", lambda *_: None)
    removing(monkeypatch, paths.blob("org/repo", SHA256), 99)
    with pytest.raises(LlmrunError, match=r"^tiny: another program removed files during the download$"):
        download(model, said)
    assert hub.downloads() == 3
    assert folders.wrong(model, whole=False) == []


def test_what_vanishes_while_it_is_looked_at_is_fetched(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(model, said).unlink()
    known = model_records.known_digest

    def vanishing(path: Path, first: Path) -> str | None:
        monkeypatch.setattr(model_records, "known_digest", known)
        path.unlink()
        raise FileNotFoundError(path)

    monkeypatch.setattr(model_records, "known_digest", vanishing)
    assert download(model, said).read_bytes() == MODEL
    assert hub.downloads() == 2


def test_no_link_is_put_to_nothing(folders: Folders, model: Artifact) -> None:
    assert isinstance(model.source, HubSource)
    link = paths.snapshot_file("org/repo", model.commit, "sub/model.gguf")
    with pytest.raises(LlmrunError, match="another program removed files"):
        download_module._point(link, paths.blob("org/repo", SHA256))


def test_a_file_that_vanished_when_it_was_whole_is_one_sentence(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(remote: object, partial: PartialFile, *_: object) -> str:
        partial.path.unlink()
        return SHA256

    monkeypatch.setattr(download_module, "fetch", fetched)
    with pytest.raises(LlmrunError, match="incomplete: another program removed files during the download"):
        download(model, said)


def test_a_branch_points_nowhere_that_has_not_reached_the_disk(
    folders: Folders, model: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, synced = paths.reference_file("org/repo", "main"), []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        new = reference.with_name(f"{reference.name}.{os.getpid()}")
        synced.append(new.read_text() if new.exists() else "")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    download(model, said)
    assert model.commit in synced


# --- misbehaving servers ----------------------------------------------------------------------------------------------


def flipped(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


@pytest.mark.push
@pytest.mark.parametrize(
    "faults",
    [
        [Fault(cut_after=HALF), Fault(ignore_range=True)],
        [Fault(cut_after=HALF), Fault(headers={"ETag": '"other"'})],
        [Fault(cut_after=HALF), Fault(headers={"Content-Range": f"bytes 7-{len(MODEL) - 1}/{len(MODEL)}"})],
        [Fault(cut_after=HALF), Fault(headers={"Content-Range": ""})],
        [Fault(cut_after=HALF), Fault(headers={"Content-Range": f"bytes {HALF}-{len(MODEL) - 1}/99"})],
        [Fault(cut_after=HALF), Fault(status=416)],
        [Fault(headers={"Content-Length": str(HALF)})],
        [Fault(ignore_range=True, headers={"Content-Length": str(HALF)})],
        [Fault(ignore_range=True, headers={"Content-Length": "", "Connection": "close"}, cut_after=HALF)],
        [Fault(ignore_range=True, headers={"Content-Length": "", "Connection": "close"}, alter=lambda b: b + b"!")],
        [Fault(alter=flipped)],
        [Fault(cut_after=HALF, alter=flipped), Fault(alter=flipped)],
        [Fault(status=429, headers={"Retry-After": "0"}), Fault(on="hub", status=503), Fault(status=500)],
        [Fault(on="hub", status=429, times=3)],
        [Fault(on="hub", headers={"Location": "http://127.0.0.1:9/nobody"})],
    ],
)
def test_a_server_that_errs_for_a_while_still_gives_the_model(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, faults: list[Fault]
) -> None:
    hub.faults += [Fault(**vars(fault)) for fault in faults]
    assert download(model, said).read_bytes() == MODEL
    assert hub.faults == []
    assert folders.wrong(model, whole=True) == []


@pytest.mark.push
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Fault(on="hub", status=401), NetworkError, "not authorised (HTTP 401)"),
        (Fault(on="hub", status=403), NetworkError, "access denied (HTTP 403)"),
        (
            Fault(on="hub", status=403, headers={"X-Error-Code": "GatedRepo"}),
            NetworkError,
            "the repository is gated (HTTP 403)",
        ),
        (Fault(on="hub", status=404), ModelNotFound, "no such file (HTTP 404)"),
        (Fault(on="hub", status=418), NetworkError, "refused (HTTP 418)"),
        (Fault(status=403), NetworkError, "access denied (HTTP 403)"),
        (Fault(headers={"Content-Encoding": "gzip"}), NetworkError, "the server sent gzip instead of the plain file"),
        (
            Fault(on="hub", status=503, times=99),
            NetworkError,
            "(HTTP 503): gave up after 6 tries, with 0 of 2,500,004 bytes received",
        ),
        (Fault(on="hub", status=429, times=99, headers={"Retry-After": "9999"}), NetworkError, "refused (HTTP 429)"),
        (Fault(cut_after=0, times=99), NetworkError, "gave up after 6 tries, with 0 of 2,500,004 bytes received"),
        (Fault(alter=flipped, times=2), IntegrityError, f", expected {SHA256}; nothing was kept"),
        (
            Fault(headers={"Content-Range": f"bytes 0-{len(MODEL) - 1}/99"}, times=2),
            IntegrityError,
            "the server's file is 99 bytes, expected 2,500,004",
        ),
        (
            Fault(on="hub", headers={"X-Linked-Etag": f'"{"f" * 64}"'}, times=2),
            IntegrityError,
            f"the file on the server has changed: sha256 {'f' * 64}, expected {SHA256}",
        ),
        (
            Fault(on="hub", headers={"Location": "ftp://x/y"}),
            NetworkError,
            "refused a redirect to ftp://x/y: not a valid URL",
        ),
        (Fault(on="hub", headers={"Location": "http://[::1/y"}), NetworkError, "refused a redirect"),
        (Fault(on="hub", headers={"Location": "/org/repo/resolve/main/sub/model.gguf"}, times=99), NetworkError, "10"),
    ],
)
def test_what_does_not_pass_is_one_line_and_nothing_is_left(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, fault: Fault, error: type[LlmrunError], words: str
) -> None:
    hub.faults.append(Fault(**vars(fault)))
    with pytest.raises(LlmrunError) as caught:
        download(model, said)
    assert type(caught.value) is error
    assert str(caught.value).startswith("sub/model.gguf: ")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert TOKEN not in str(caught.value) + caught.value.hint
    assert [path for path in folders.files() if ".locks" not in path.parts] == []


def test_a_long_wait_that_the_server_asks_for_is_told(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.Event.wait", lambda _self, _seconds=None: True)
    hub.faults.append(Fault(status=503, headers={"Retry-After": "20"}))
    download(model, said)
    assert said.notes == ["sub/model.gguf: server error (HTTP 503); trying again in 20 s"]


def test_the_token_goes_to_the_hub_alone(folders: Folders, hub: FakeHub, model: Artifact, said: Said) -> None:
    hub.add("org/repo", {"sub/model.gguf": MODEL}, token=TOKEN)
    hub.moved["org/old"] = "org/repo"
    old = artifact_of(hub.repositories["org/repo"], "sub/model.gguf")
    hub.faults += [Fault(cut_after=HALF, alter=then(hub.expire)), Fault(cut_after=9)]
    download(old, said)
    at_hub = {asked.authorization for asked in hub.asked if asked.at == "hub"}
    assert at_hub == {f"Bearer {TOKEN}"}
    assert len(of_storage(hub)) > 2
    assert {asked.authorization for asked in of_storage(hub)} == {""}


def test_another_port_of_the_same_host_gets_no_token(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said
) -> None:
    with fake_hub() as other:
        elsewhere = other.public(MODEL).replace("localhost", "127.0.0.1")
        hub.faults.append(Fault(on="hub", headers={"Location": elsewhere}))
        download(model, said)
        assert [asked.authorization for asked in other.asked] == [""]


# --- disks ------------------------------------------------------------------------------------------------------------


def test_room_is_looked_for_before_the_first_byte(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_writes, "SPARE", 1 << 60)
    with pytest.raises(DoesNotFit, match=r"tiny needs 2,500,004 bytes plus .* in reserve, but .* are free"):
        download(model, said)
    assert hub.asked == []
    assert [path for path in folders.files() if ".locks" not in path.parts] == []


@pytest.mark.push
def test_room_is_needed_for_all_shards_before_the_first_byte(
    folders: Folders, hub: FakeHub, shards: Artifact, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: Usage(free=safe_writes.SPARE + shards.size - 1))
        with pytest.raises(DoesNotFit, match=rf"tiny needs {shards.size:,} bytes"):
            download(shards, said)
    assert hub.asked == []
    hub.faults += [Fault(cut_after=HALF, skip=1), Fault(on="hub", status=403, skip=2)]
    with pytest.raises(NetworkError):
        download(shards, said)
    # The first file and half of the second are stored, so room for the rest is enough.
    left = shards.files[1].size - HALF + shards.files[2].size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=safe_writes.SPARE + left))
    assert download(shards, said).is_file()


def test_a_disk_that_is_full_in_the_middle_is_told_and_gone_on_from(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, full_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the check passes, as if another program filled the disk later
    monkeypatch.setattr(safe_writes, "SPARE", -(1 << 40))
    monkeypatch.setenv("HF_HOME", str(full_disk.folder))
    with pytest.raises(DoesNotFit, match=r"disk: .*: full, [\d,]+ bytes free"):
        download(model, said)
    received = hub.sent()
    full_disk.make_room()
    assert download(model, said).read_bytes() == MODEL
    assert int(ranges(hub)[-1].removeprefix("bytes=").partition("-")[0]) > 500_000
    assert hub.sent() > received


@pytest.mark.parametrize("folder", ["hf", "data"])
def test_a_folder_that_cannot_be_made_is_one_sentence(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, folder: str
) -> None:
    (folders.root / folder).write_text("a file where the folder should be")
    with pytest.raises(LlmrunError, match=r"cannot be written: (Not a directory|File exists)") as caught:
        download(model, said)
    assert "LLMRUN_DATA_DIR" in caught.value.hint
    assert hub.asked == []


HOME = "models--org--repo"


@pytest.mark.parametrize("folder", [HOME, f"{HOME}/blobs", f"{HOME}/snapshots", f"{HOME}/refs", ".locks"])
def test_nothing_is_written_through_a_link_that_leads_out_of_the_cache(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, folder: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = folders.cache / folder
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(LlmrunError, match="this link leads out of"):
        download(model, said)
    assert list(outside.iterdir()) == []


def test_links_in_the_place_of_files_are_replaced_not_written_through(
    folders: Folders, hub: FakeHub, model: Artifact, said: Said, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    blob, pointer = paths.blob("org/repo", SHA256), paths.snapshot_file("org/repo", model.commit, "sub/model.gguf")
    reference = paths.reference_file("org/repo", "main")
    partial = paths.partial_of(paths.blob("org/repo", SHA256))
    for path in (blob, pointer, reference, partial, partial.with_name(partial.name + ".journal")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(victim)
    assert download(model, said) == pointer
    assert victim.read_bytes() == b"mine"
    assert folders.wrong(model, whole=True) == []
    assert reference.read_text() == model.commit
    assert os.path.realpath(pointer) == os.path.realpath(folders.cache) + f"/models--org--repo/blobs/{SHA256}"
