"""Tests that removal deletes exactly what was asked for: nothing else, nothing outside, and nothing in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
from huggingface_hub import scan_cache_dir

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.hub.local import paths
from llmrun.hub.local.model_records import mark_used, record_path
from llmrun.hub.local.safe_writes import alone_with, in_use
from llmrun.hub.local.stored_models import read_repository
from llmrun.hub.upkeep.inventory import Model, models, select
from llmrun.hub.upkeep.removal import Removal, partials, prunings, referenced, removal_of, removal_of_partial, remove
from tests.support.hub.model_stores import Stores, commit, gguf, sha256

ONE, TWO = gguf(salt=1), gguf(salt=2)


def model(name: str) -> Model:
    return select(name, models())


def the_hubs_own_tool_finds_nothing_wrong(stores: Stores) -> None:
    found = scan_cache_dir(stores.cache)
    assert [str(warning) for warning in found.warnings] == []


def test_a_model_and_its_bytes_and_its_record_and_its_repository(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"sub/m-Q4_0.gguf": ONE})
    stores.shared("org/other", {"m-Q4_0.gguf": TWO})
    mark_used(link)
    (stores.repository("org/name") / ".no_exist" / commit(1)).mkdir(parents=True)
    (stores.repository("org/name") / ".no_exist" / commit(1) / "adapter.json").touch()
    planned = removal_of(model("hf:org/name:Q4_0"))
    assert planned.freed == len(ONE)
    assert link.exists()
    assert remove(planned) == len(ONE)
    assert not stores.repository("org/name").exists()
    assert not list((stores.models / ".records").iterdir())
    assert [each.name for each in models()] == ["hf:org/other:Q4_0"]
    the_hubs_own_tool_finds_nothing_wrong(stores)


def test_bytes_that_another_name_needs_stay(stores: Stores) -> None:
    stores.shared("org/name", {"a-Q4_0.gguf": ONE, "b-Q8_0.gguf": ONE, "README.md": b"x"})
    assert remove(removal_of(model("hf:org/name:Q4_0"))) == 0
    assert remove(removal_of(model("hf:org/name:Q8_0"))) == len(ONE)
    assert (stores.repository("org/name") / "snapshots" / commit(1) / "README.md").read_bytes() == b"x"
    assert (stores.repository("org/name") / "refs" / "main").exists()
    the_hubs_own_tool_finds_nothing_wrong(stores)


def test_all_revisions_of_the_same_bytes_go_and_others_stay(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": ONE}, number=1, ref="old")
    stores.shared("org/name", {"m-Q4_0.gguf": ONE}, number=2, ref="v2")
    stores.shared("org/name", {"m-Q4_0.gguf": TWO}, number=3)
    assert remove(removal_of(model("hf:org/name:Q4_0@old"))) == len(ONE)
    assert [each.name for each in models()] == ["hf:org/name:Q4_0"]
    assert sorted(path.name for path in (stores.repository("org/name") / "refs").iterdir()) == ["main"]
    the_hubs_own_tool_finds_nothing_wrong(stores)


def test_all_shards_go(stores: Stores) -> None:
    stores.shared("org/big", {f"m-0000{number}-of-00002.gguf": gguf(salt=number) for number in (1, 2)})
    (big,) = models()
    assert remove(removal_of(big)) == 2 * len(ONE)
    assert not stores.repository("org/big").exists()


def test_a_file_without_a_link_goes_itself(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    (stores.repository("org/name") / "blobs" / sha256(ONE)).replace(link)
    assert remove(removal_of(models()[0])) == len(ONE)
    assert not stores.repository("org/name").exists()


def test_a_link_out_of_the_store_goes_and_what_it_points_at_stays(stores: Stores, tmp_path: Path) -> None:
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(ONE)
    (link,) = stores.shared("org/name", {"m.gguf": TWO})
    link.unlink()
    link.symlink_to(outside)
    planned = removal_of(models()[0])
    assert planned.notes == (
        f"{link}: only the link is removed; its target {outside} is outside the cache and is kept",
    )
    assert remove(planned) == 0
    assert not link.is_symlink()
    assert outside.read_bytes() == ONE


def test_a_link_to_elsewhere_in_the_repository_is_no_blob(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    odd = stores.repository("org/name") / "odd.gguf"
    odd.write_bytes(TWO)
    link.unlink()
    link.symlink_to(odd)
    planned = removal_of(models()[0])
    assert planned.notes == ()
    assert planned.blobs == ()
    remove(planned)
    assert odd.exists()


@pytest.mark.parametrize("folder", ["", "snapshots", "blobs", "refs"])
def test_a_folder_that_is_a_link_is_refused(stores: Stores, tmp_path: Path, folder: str) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    (named,) = models()
    linked = stores.repository("org/name") / folder
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    before = stores.everything()
    with pytest.raises(LlmrunError, match="this folder is a link, so nothing in it is removed"):
        removal_of(named)
    assert stores.everything() == before


def test_our_own_folder(stores: Stores) -> None:
    path = stores.own("m.gguf", ONE)
    mark_used(path)
    assert remove(removal_of(models()[0])) == len(ONE)
    assert not path.exists()
    assert not record_path(path).exists()


def test_what_others_hold_is_refused_with_their_own_way(stores: Stores) -> None:
    stores.ollama(ONE, "llama3.2", "1b")
    stores.lm_studio("org/m/m.gguf", TWO)
    before = stores.everything()
    with pytest.raises(UsageError) as refused:
        removal_of(model("ollama:llama3.2:1b"))
    assert refused.value.hint == "ollama rm llama3.2:1b"
    with pytest.raises(UsageError) as refused:
        removal_of(model("lmstudio:org/m/m.gguf"))
    assert "LM Studio" in refused.value.hint
    assert stores.everything() == before


def test_a_model_in_use_is_refused_and_free_when_its_user_dies(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    before = stores.everything()
    program = (
        "import sys; from pathlib import Path; from llmrun.hub.local.safe_writes import in_use\n"
        f"with in_use(Path({str(link)!r})):\n    print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "open\n"
        with pytest.raises(LlmrunError, match=r"hf:org/name/m\.gguf: is in use: nothing was removed"):
            remove(removal_of(models()[0]))
        assert stores.everything() == before
        user.kill()
    assert remove(removal_of(models()[0])) == len(ONE)


def test_two_may_use_a_model_and_every_shard_is_held(stores: Stores) -> None:
    shards = [stores.own(f"m-0000{number}-of-00002.gguf", gguf(salt=number)) for number in (1, 2)]
    with in_use(shards[0]), in_use(shards[0]):
        for shard in shards:
            with alone_with([shard]) as busy:
                assert busy == shard
    with alone_with(shards) as busy:
        assert busy is None
        with in_use(shards[0]):  # opening still works, because the lock only informs
            pass
    with in_use(stores.models / "none.gguf"), alone_with([stores.models / "none.gguf"]) as busy:
        assert busy is None


def test_a_file_system_without_locks_is_no_trouble(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    path = stores.own("m.gguf", ONE)

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with in_use(path), alone_with([path]) as busy:
        assert busy is None


def test_a_system_whose_open_files_cannot_be_removed_needs_no_locks(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stores.own("m.gguf", ONE)
    with in_use(path):
        monkeypatch.setattr(sys, "platform", "win32")
        with alone_with([]) as busy:
            assert busy is None
        from llmrun.hub.local import safe_writes

        assert safe_writes.try_lock(None, path, shared=False)  # type: ignore[arg-type]
        monkeypatch.undo()


def test_a_model_that_is_being_downloaded_is_refused(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    lock = paths.shared_lock("org/name", sha256(ONE))
    lock.parent.mkdir(parents=True)
    with filelock.FileLock(lock), pytest.raises(LlmrunError, match="is being downloaded"):
        remove(removal_of(models()[0]))
    assert remove(removal_of(models()[0])) == len(ONE)


def test_another_users_lock_is_no_trouble(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    lock = paths.shared_lock("org/name", sha256(ONE))
    lock.parent.mkdir(parents=True)
    lock.touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert remove(removal_of(models()[0])) == len(ONE)


def test_a_file_that_cannot_be_removed_is_one_sentence(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    planned = removal_of(models()[0])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(LlmrunError, match="cannot be removed: Permission denied"):
            remove(planned)
    assert link.exists()


def test_a_process_that_dies_in_the_middle_leaves_a_whole_cache(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, rmdir = Path.unlink, os.rmdir
    left = 0

    def step() -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1

    def dying_unlink(path: Path, *, missing_ok: bool = False) -> None:
        step()
        unlink(path, missing_ok=missing_ok)

    def dying_rmdir(path: str) -> None:
        step()
        rmdir(path)

    for steps in range(16):
        stores.shared("org/name", {"m-Q4_0.gguf": ONE, "m-Q8_0.gguf": TWO}, number=steps + 1)
        left = steps
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", dying_unlink)
            patch.setattr(os, "rmdir", dying_rmdir)
            for each in models():
                try:
                    remove(removal_of(each))
                except KeyboardInterrupt:
                    break
        repository = stores.repository("org/name")
        if repository.exists() and not list(repository.iterdir()):
            repository.rmdir()  # the Hub's tool warns of an empty folder; see removal.py
        the_hubs_own_tool_finds_nothing_wrong(stores)
        for each in models():
            remove(removal_of(each))
        the_hubs_own_tool_finds_nothing_wrong(stores)
        assert models() == []
        for blob in stores.cache.glob("*/blobs/*"):
            blob.unlink()


def test_a_partial_download_and_what_lies_beside_it(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    partial = paths.partial_of(paths.blob("org/name", "b" * 64))
    partial.write_bytes(b"half")
    journal = partial.with_name(partial.name + ".journal")
    journal.write_bytes(b'{"size": 100}\n' + b"%020d %020d %020d\n" % (0, 4, 4))
    (begun,) = partials()
    assert (begun.name, begun.done, begun.total) == ("hf:org/name", 4, 100)
    with filelock_held("org/name", "b" * 64), pytest.raises(LlmrunError, match="is being downloaded"):
        remove(removal_of_partial(begun))
    assert remove(removal_of_partial(begun)) > 4
    assert not partial.exists()
    assert not journal.exists()
    assert len(models()) == 1


def filelock_held(repository: str, digest: str) -> filelock.BaseFileLock:
    lock = paths.shared_lock(repository, digest)
    lock.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(lock)


@pytest.mark.parametrize("journal", [b"", b"[]\n", b"\xff", b"{}\nx y z\n", b"[" * 99_999, b'{"size": "x"}\n1 2\n'])
def test_a_journal_may_say_anything(stores: Stores, journal: bytes) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    partial = paths.partial_of(paths.blob("org/name", "b" * 64))
    partial.write_bytes(b"half")
    partial.with_name(partial.name + ".journal").write_bytes(journal)
    (begun,) = partials()
    assert (begun.done, begun.total) == (0, 0)


def test_partials_of_the_web_and_what_is_none(stores: Stores) -> None:
    path = paths.web_file("https://example.com/m.gguf", "m.gguf")
    path.parent.mkdir(parents=True)
    partial = path.with_name(path.name + paths.PARTIAL)
    partial.write_bytes(b"half")
    stores.shared("org/name", {"m.gguf": ONE})
    paths.partial_of(paths.blob("org/name", "b" * 64)).symlink_to(partial)
    (stores.cache / "other").mkdir()
    (begun,) = partials()
    assert (begun.name, begun.files, begun.done) == (str(partial), (partial,), 0)


def test_a_name_of_a_blob_that_is_none_has_no_lock(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    odd = stores.repository("org/name") / "blobs" / "odd"
    odd.write_bytes(b"x")
    assert remove(Removal("odd", None, (odd,), ())) == 1


def test_empty_folders_that_cannot_be_removed_stay(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    stores.shared("org/name", {"m.gguf": ONE})

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "rmdir", refuse)
    assert remove(removal_of(models()[0])) == len(ONE)
    assert stores.repository("org/name").is_dir()
    assert referenced(read_repository("org/name")) == set()


def test_a_model_that_a_pull_is_putting_in_place_stays(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m-Q4_0.gguf": ONE})
    planned, lock = removal_of(model("hf:org/name:Q4_0")), paths.lock_file("org/name")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(lock), pytest.raises(LlmrunError, match="is being downloaded"):
        remove(planned)
    assert link.exists()


def test_a_model_that_another_rm_took_is_gone(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": ONE})
    found = model("hf:org/name:Q4_0")
    remove(removal_of(found))
    assert removal_of(found).links == ()
    assert remove(removal_of(found)) == 0


def test_what_is_behind_a_link_in_our_folder_is_not_ours(stores: Stores, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "mine.gguf").write_bytes(ONE)
    (stores.models / "web").mkdir(parents=True)
    (stores.models / "web" / "z").symlink_to(precious)
    assert models() == []
    (stores.models / "web" / "z").unlink()
    (stores.models / "web").rmdir()
    (stores.models / "web").symlink_to(tmp_path)
    assert models() == []
    assert partials() == []


# --- projectors -------------------------------------------------------------------------------------------------------

PROJECTOR = gguf(salt=9)


def test_the_last_model_takes_its_projector_along(stores: Stores) -> None:
    files = {"m-Q4_0.gguf": ONE, "m-Q8_0.gguf": TWO, "mmproj-F16.gguf": PROJECTOR}
    *_, projector = stores.shared("org/name", files)
    assert remove(removal_of(model("hf:org/name:Q4_0"))) == len(ONE)
    assert projector.exists(), "the other quantization needs it"
    assert remove(removal_of(model("hf:org/name:Q8_0"))) == len(TWO) + len(PROJECTOR)
    assert not stores.repository("org/name").exists()


def test_another_models_projector_stays(stores: Stores) -> None:
    files = {"a-Q4_0.gguf": ONE, "b-Q4_0.gguf": TWO, "mmproj-a-F16.gguf": PROJECTOR, "mmproj-b-F16.gguf": gguf(salt=8)}
    _, _, its_own, other = stores.shared("org/name", files)
    assert remove(removal_of(model("hf:org/name/a-Q4_0.gguf"))) == len(ONE) + len(PROJECTOR)
    assert not its_own.exists()
    assert other.exists()


def test_a_newer_revision_keeps_the_projector_of_an_older_one(stores: Stores) -> None:
    *_, projector = stores.shared("org/name", {"m-Q4_0.gguf": ONE, "mmproj-F16.gguf": PROJECTOR}, ref="old")
    stores.shared("org/name", {"m-Q4_0.gguf": TWO}, number=2)
    assert remove(removal_of(model("hf:org/name:Q4_0@old"))) == len(ONE)
    assert projector.exists()
    assert remove(removal_of(model("hf:org/name:Q4_0"))) == len(TWO) + len(PROJECTOR)
    the_hubs_own_tool_finds_nothing_wrong(stores)


def test_a_projector_in_our_own_folder_goes_with_its_model(stores: Stores) -> None:
    stores.own("mine.gguf", ONE)
    stores.own("mine-too.gguf", TWO)
    stores.own("mine.mmproj-F16.gguf", PROJECTOR)
    assert remove(removal_of(model("mine-too"))) == len(TWO)
    assert remove(removal_of(model("mine"))) == len(ONE) + len(PROJECTOR)
    assert not list(stores.models.glob("*.gguf"))


def test_pruning_keeps_the_only_projector(stores: Stores) -> None:
    *_, old = stores.shared("org/name", {"m-Q4_0.gguf": ONE, "mmproj-F16.gguf": PROJECTOR}, ref=None)
    stores.shared("org/name", {"m-Q4_0.gguf": TWO}, number=2)
    for planned in prunings():
        assert isinstance(planned, Removal)
        remove(planned)
    assert old.exists()
    assert not old.with_name("m-Q4_0.gguf").exists()
    stores.shared("org/name", {"m-Q4_0.gguf": TWO, "mmproj-F16.gguf": gguf(salt=8)}, number=3)
    for planned in prunings():
        assert isinstance(planned, Removal)
        remove(planned)
    assert not old.exists()
