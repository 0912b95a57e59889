"""Tests of imports: what may be imported under which name, and that a failed import leaves nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.backends import registry
from llmrun.base.errors import BadGGUF, DoesNotFit, LlmrunError, ModelFileError, UnsupportedModel, UsageError
from llmrun.hub.local import safe_writes
from llmrun.hub.local.model_records import known_digest, remember_digests
from llmrun.hub.local.own_models import own_models
from llmrun.hub.local.projectors import projector_for
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.model_file import LocalPath, understand
from llmrun.hub.upkeep import importing
from llmrun.hub.upkeep.importing import COPY, LINK, MOVE, Import, carry_out, plan_import
from llmrun.hub.upkeep.inventory import models, select
from llmrun.hub.upkeep.removal import removal_of, removal_of_own, remove
from llmrun.hub.upkeep.verification import verify
from llmrun.options.settings import MMPROJ_OFF
from tests.support.gguf.gguf_bytes import RawGGUF, string
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.hub.model_stores import Stores, gguf, sha256
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")


@pytest.fixture
def original(stores: Stores) -> Path:
    return tiny_llama(stores.root / "My Model (1)-Q8_0.gguf")


def run(file: Path, name: str | None = None, how: str = LINK, *, force: bool = False) -> Import:
    planned = plan_import(file, name, how, force=force)
    carry_out(planned, how, Silent())
    return planned


def names() -> list[str]:
    return [model.name for model in models()]


def in_folder(stores: Stores) -> list[str]:
    """Return the files in our own folder, except locks and records."""
    return sorted(path.relative_to(stores.models).as_posix() for path in stores.models.rglob("[!.]*.gguf"))


@pytest.mark.parametrize("how", [LINK, COPY, MOVE])
def test_the_model_has_its_name_and_rm_keeps_the_original(stores: Stores, original: Path, how: str) -> None:
    data = original.read_bytes()
    planned = run(original, "Mine:7B", how)
    (final,) = planned.finals
    assert final.read_bytes() == data
    assert final.is_symlink() == (how == LINK)
    assert original.exists() == (how != MOVE)
    assert names() == ["Mine:7B"]
    meant = understand("mine:7b")
    assert meant == LocalPath(final, "Mine:7B")
    assert not (stores.models / ".partial").exists()
    removal = removal_of(select("mine:7b", models()))
    assert bool(removal.notes) == (how == LINK)
    assert remove(removal) == (0 if how == LINK else len(data))
    assert names() == []
    assert original.exists() == (how != MOVE)


def test_the_default_name_is_the_files_and_easy_to_type(stores: Stores, original: Path) -> None:
    assert run(original).name == "My-Model-1-Q8_0"
    assert names() == ["My-Model-1-Q8_0"]


def test_all_shards_of_a_split_model_are_imported(
    stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "check_supported", lambda file: None)
    from tests.support.gguf.gguf_shards import raw_shards

    shards = [stores.root / f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path, raw in zip(shards, raw_shards(), strict=True):
        path.write_bytes(raw.build())
    for how in (LINK, COPY):
        run(shards[0], how=how)
        (model,) = models()
        assert (model.name, len(model.files)) == ("big", 3)
        assert verify(model, (), Silent()).is_whole
    run(original, "big", force=True)  # one file takes the place of three
    assert in_folder(stores) == ["big.gguf"]
    with pytest.raises(ModelFileError, match="name the first shard"):
        run(shards[1])
    shards[2].unlink()
    with pytest.raises(LlmrunError, match="a file of the model is missing"):
        run(shards[0], "other")


def test_only_complete_models_that_run_can_be_imported(
    stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", registry.BACKENDS[:1])  # llama.cpp may know more architectures
    cut = stores.root / "cut.gguf"
    cut.write_bytes(original.read_bytes()[:-100])
    projector = stores.root / "mmproj.gguf"
    projector.write_bytes(RawGGUF({"general.type": string("mmproj"), "general.architecture": string("clip")}).build())
    strange = tiny_llama(stores.root / "strange.gguf", extra={"general.architecture": "strange"})
    page = stores.root / "page.gguf"
    page.write_text("<html>")
    for file, error, words in (
        (cut, BadGGUF, "incomplete GGUF file"),
        (projector, ModelFileError, "not a model"),
        (strange, UnsupportedModel, "strange"),
        (page, BadGGUF, "web page"),
        (stores.root, LlmrunError, "is a folder"),
        (stores.root / "none.gguf", LlmrunError, "no such file"),
    ):
        with pytest.raises(error, match=words) as caught:
            run(file, "mine")
        assert caught.value.hint
    assert not stores.models.exists()


@pytest.mark.parametrize(
    "name",
    ["", ".", "-m", "a/b", "../a", "a\\b", "hf:x", "a,b", "localhost", "x:8080", " a", "mmproj-x", "x\n", "a" * 300],
)
def test_names_that_commands_would_not_find_are_refused(stores: Stores, original: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a model") as caught:
        run(original, name or " ")
    assert caught.value.hint


def test_names_in_use_are_refused_unless_forced(stores: Stores, original: Path) -> None:
    (stores.root / "models.toml").write_text(
        '[presets.pirate]\nmodel = "qwen3:4b"\n[shortnames]\nsmall = "qwen3:4b"\n', encoding="utf-8"
    )
    other = stores.own("taken.gguf", gguf())
    remember_digests([other], [sha256(gguf())], name="taken", source=str(other))
    for name, words in (
        ("taken", "the name of .*taken.gguf"),
        ("TAKEN.gguf", "the name of .*taken.gguf"),
        ("qwen3:4b", "a model in the catalogue"),
        ("smollm2", "a model in the catalogue"),
        ("pirate", "a preset or a short name"),
        ("small", "a preset or a short name"),
    ):
        with pytest.raises(UsageError, match=words):
            run(original, name)
    for name in ("pirate", "small"):
        with pytest.raises(UsageError, match="a preset or a short name"):
            run(original, name, force=True)
    for name in ("taken", "smollm2"):
        assert run(original, name, force=True).name == name
        meant = understand(name)
        assert isinstance(meant, LocalPath)
        assert meant.path.samefile(original)
    assert known_digest(stores.models / "taken.gguf") is None


def test_importing_again_changes_only_what_differs(stores: Stores, original: Path) -> None:
    (final,) = run(original, "mine").finals
    assert plan_import(original, "mine", LINK, force=False).is_done
    assert plan_import(final, "mine", LINK, force=False).is_done
    run(original, "mine", COPY)  # the copy replaces the link
    assert not final.is_symlink()
    assert plan_import(final, None, MOVE, force=False).is_done
    run(final, "yours", MOVE)  # a model in our folder is renamed
    assert in_folder(stores) == ["yours.gguf"]


def test_a_broken_link_can_be_replaced_or_removed(stores: Stores, original: Path) -> None:
    moved = original.rename(original.with_name("moved.gguf"))
    run(moved, "mine")
    moved.rename(original)
    (broken,) = own_models()
    assert (broken.name, broken.target) == ("mine", str(moved))
    assert run(original, "mine").finals[0].samefile(original)
    original.unlink()
    (broken,) = own_models()
    assert broken.missing
    assert remove(removal_of_own(broken.name, broken.files)) == 0
    assert own_models() == []


def test_shards_beside_a_broken_link_need_force(stores: Stores, original: Path) -> None:
    stores.own("mine-00002-of-00002.gguf", gguf())
    (stores.models / "mine-00001-of-00002.gguf").symlink_to(stores.root / "gone.gguf")
    with pytest.raises(UsageError, match="the name of"):
        run(original, "mine")
    assert in_folder(stores) == ["mine-00001-of-00002.gguf", "mine-00002-of-00002.gguf"]


def test_another_spelling_of_the_name_keeps_the_file(
    stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignoring_case(partial: Path, final: Path) -> None:  # as on macOS and Windows, where two spellings name one file
        safe_writes.put_in_place(partial, final)
        os.link(final, other)

    monkeypatch.setattr(importing, "put_in_place", ignoring_case)
    planned = plan_import(original, "mine", COPY, force=False)
    other = stores.models / "Mine.gguf"
    carry_out(replace(planned, replaced=(other,)), COPY, Silent())
    assert other.exists()


def test_a_full_disk_or_ctrl_c_leaves_nothing(stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Silent):
        def progress(self, label: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

    planned = plan_import(original, "mine", COPY, force=False)
    with pytest.raises(KeyboardInterrupt):
        carry_out(planned, COPY, Interrupted())
    monkeypatch.setattr(safe_writes, "SPARE", 1 << 60)
    with pytest.raises(DoesNotFit, match="mine needs"):
        carry_out(planned, COPY, Silent())
    assert in_folder(stores) == []
    assert not (stores.models / ".partial").exists()


def test_a_move_to_another_disk_copies_first(stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def refusing(path: Path, target: Path) -> Path:
        if path == original:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refusing)
    data = original.read_bytes()
    (final,) = run(original, "mine", MOVE).finals
    assert final.read_bytes() == data
    assert not original.exists()


def test_a_move_that_fails_halfway_is_undone(stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = original, tiny_llama(stores.root / "second.gguf")
    finals = tuple(stores.models / f"mine-0000{number}-of-00002.gguf" for number in (1, 2))
    replace = Path.replace

    def refusing(path: Path, target: Path) -> Path:
        if path == files[1]:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refusing)
    with pytest.raises(LlmrunError, match="cannot be written"):
        carry_out(Import("mine", files, finals), MOVE, Silent())
    assert all(file.exists() for file in files)
    assert in_folder(stores) == []


def test_files_of_other_programs_are_not_moved(stores: Stores, original: Path) -> None:
    held = stores.lm_studio("org/model/m-Q8_0.gguf", original.read_bytes())
    link = stores.root / "link.gguf"
    link.symlink_to(original)
    for file, words in ((held, "another program needs this file: lmstudio:"), (link, "is a link to")):
        with pytest.raises(UsageError, match=words):
            run(file, "mine", MOVE)
    run(held, "mine")
    assert held.exists()


def test_a_system_without_links_suggests_a_copy(
    stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "symlink_to", refusing)
    with pytest.raises(LlmrunError, match="links cannot be created") as caught:
        run(original, "mine")
    assert caught.value.hint == "add --copy or --move"


def test_a_file_that_grows_is_not_copied_halfway(
    stores: Stores, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Growing(Silent):
        def progress(self, label: str, done: int, total: int) -> None:
            if done == total:
                with original.open("ab") as file:
                    file.write(b"more")

    with pytest.raises(ModelFileError, match="changed while it was being copied"):
        carry_out(plan_import(original, "mine", COPY, force=False), COPY, Growing())
    assert in_folder(stores) == []


def test_verify_keeps_no_digest_of_a_linked_file(stores: Stores, original: Path) -> None:
    run(original, "mine")
    (model,) = models()
    assert verify(model, (), Silent()).is_whole
    assert known_digest(original) is None


# --- projectors -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sees(stores: Stores) -> Path:
    """Return a model with its projector next to it."""
    tiny_projector(stores.root, "gemma3").rename(stores.root / "mmproj-sees-F32.gguf")
    return tiny_text_model(stores.root, "gemma3").rename(stores.root / "sees-F32.gguf")


@pytest.mark.parametrize("how", [LINK, COPY, MOVE])
def test_the_projector_comes_along(stores: Stores, sees: Path, how: str) -> None:
    run(sees, "mine", how)
    assert in_folder(stores) == ["mine.gguf", "mine.mmproj-F32.gguf"]
    assert names() == ["mine"]
    final = stores.models / "mine.mmproj-F32.gguf"
    assert projector_for(stores.models / "mine.gguf") == final
    assert final.is_symlink() == (how == LINK)
    assert (stores.root / "mmproj-sees-F32.gguf").exists() == (how != MOVE)
    if how == LINK:
        assert plan_import(sees, "mine", how, force=False).is_done
    remove(removal_of(select("mine", models())))
    assert in_folder(stores) == []


@pytest.mark.parametrize("is_other_disk", [False, True])
def test_moves_leave_projectors_of_other_models(
    stores: Stores, sees: Path, is_other_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copy(sees, sees.with_name("sees-Q8_0.gguf")))
    if is_other_disk:
        monkeypatch.setattr(importing, "_moved", lambda *arguments: False)
    planned = run(sees, "mine", MOVE)
    assert in_folder(stores) == ["mine.gguf", "mine.mmproj-F32.gguf"]
    assert projector_for(other) == stores.root / "mmproj-sees-F32.gguf"
    assert (sees.exists(), planned.note.split(":")[0]) == (False, "mmproj-sees-F32.gguf is copied, not moved")


def test_a_projector_that_arrives_later_is_linked(stores: Stores, sees: Path) -> None:
    projector = stores.root / "mmproj-sees-F32.gguf"
    hidden = projector.rename(stores.root / "hidden")
    run(sees, "mine")
    assert in_folder(stores) == ["mine.gguf"]
    hidden.rename(projector)
    run(sees, "mine")
    assert in_folder(stores) == ["mine.gguf", "mine.mmproj-F32.gguf"]


def test_a_replaced_model_loses_its_projector(stores: Stores, sees: Path, original: Path) -> None:
    run(sees, "mine", COPY)
    run(original, "mine", COPY, force=True)
    assert in_folder(stores) == ["mine.gguf"]


def test_projectors_of_other_models_are_left_out_with_a_note(stores: Stores, sees: Path) -> None:
    projector = tiny_projector(stores.root, "gemma3", text_width=128).rename(stores.root / "mmproj-sees-F32.gguf")
    planned = run(sees, "mine")
    assert in_folder(stores) == ["mine.gguf"]
    assert planned.note.startswith("mmproj-sees-F32.gguf is not imported: ")
    with pytest.raises(ModelFileError, match="does not fit the model"):
        plan_import(sees, "other", LINK, force=False, mmproj=str(projector))
    assert plan_import(sees, "other", LINK, force=False, mmproj=MMPROJ_OFF).note == ""
