"""Tests that pruning removes what a newer download has replaced, and nothing that is still wanted."""

from __future__ import annotations

import os
import time
from pathlib import Path

from huggingface_hub import scan_cache_dir

from llmrun.base.errors import LlmrunError
from llmrun.hub.local import paths
from llmrun.hub.names import is_gguf
from llmrun.hub.upkeep import removal
from llmrun.hub.upkeep.inventory import models
from llmrun.hub.upkeep.removal import Removal, prunings, remove
from tests.support.hub.model_stores import Stores, commit, gguf, sha256

ONE, TWO = gguf(salt=1), gguf(salt=2)
LONG_AGO = time.time() - 30 * 86_400


def prune() -> dict[str, int]:
    freed = {}
    for planned in list(prunings()):
        assert isinstance(planned, Removal)
        wanted = planned.freed
        freed[planned.name] = remove(planned)
        assert freed[planned.name] == wanted
    return freed


def test_nothing_to_prune(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    before = stores.everything()
    assert prune() == {}
    assert stores.everything() == before


def test_a_replaced_revision_goes_with_all_its_files(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE, "README.md": b"old", "same.json": b"same"}, number=1)
    stores.shared("org/name", {"m.gguf": TWO, "README.md": b"new", "same.json": b"same"}, number=2)
    assert prune() == {"hf:org/name": len(ONE) + len(b"old")}
    (left,) = models()
    assert left.path.read_bytes() == TWO
    assert not (stores.repository("org/name") / "snapshots" / commit(1)).exists()
    assert not scan_cache_dir(stores.cache).warnings
    assert prune() == {}


def test_a_file_that_only_the_old_revision_has_stays(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": ONE, "m-Q8_0.gguf": gguf(salt=8)}, number=1)
    stores.shared("org/name", {"m-Q4_0.gguf": TWO}, number=2)
    assert prune() == {"hf:org/name": len(ONE)}
    assert sorted(model.name for model in models()) == ["hf:org/name:Q4_0", f"hf:org/name:Q8_0@{commit(1)[:10]}"]


def test_revisions_that_a_branch_or_a_tag_names_stay(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE}, number=1, ref="v1.0")
    stores.shared("org/name", {"m.gguf": TWO}, number=2)
    assert prune() == {}


def test_without_a_current_revision_nothing_is_old(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE}, number=1, ref=None)
    stores.shared("org/name", {"m.gguf": TWO}, number=2, ref=None)
    assert prune() == {}
    # A branch that points at a commit that is not stored replaces nothing.
    (stores.repository("org/name") / "refs").mkdir()
    (stores.repository("org/name") / "refs" / "main").write_text(commit(3))
    assert prune() == {}


def test_a_current_link_that_leads_nowhere_replaces_nothing(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE}, number=1)
    (link,) = stores.shared("org/name", {"m.gguf": TWO}, number=2)
    link.resolve().unlink()
    assert prune() == {}


def test_other_tools_models_are_left_alone(stores: Stores) -> None:
    for number, data in ((1, b"one"), (2, b"two")):
        stores.shared("google/flan", {"model.safetensors": data}, number=number)
    assert prune() == {}


def test_bytes_that_nothing_links_to_go_after_a_week(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    blobs = stores.repository("org/name") / "blobs"
    for data in (TWO, b"no model"):
        (blobs / sha256(data)).write_bytes(data)
    (blobs / "not-a-digest").write_bytes(TWO)
    (blobs / ("e" * 64)).symlink_to(stores.root)
    assert prune() == {}
    for path in blobs.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    assert prune() == {"hf:org/name": len(TWO)}
    left = [sha256(ONE), sha256(b"no model"), "not-a-digest", "e" * 64]
    assert sorted(path.name for path in blobs.iterdir()) == sorted(left)


def test_a_repository_of_which_only_bytes_are_left(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    blob = link.resolve()
    link.unlink()
    os.utime(blob, (LONG_AGO, LONG_AGO))
    assert prune() == {"hf:org/name": len(ONE)}
    assert not stores.repository("org/name").exists()


def test_downloads_of_ours_that_nobody_goes_on_with(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    whole, young, old, mute = (
        paths.partial_of(paths.blob("org/name", digest)) for digest in (sha256(ONE), *("b" * 64, "c" * 64, "d" * 64))
    )
    web = paths.web_file("https://example.com/m.gguf", "m.gguf.llmrun.incomplete")
    web.parent.mkdir(parents=True)
    for path in (whole, young, old, web):
        path.write_bytes(b"half")
        path.with_name(path.name + ".journal").write_bytes(b'{"size": 9}\n')
    mute.write_bytes(b"half")  # cannot be resumed without a journal
    theirs = stores.repository("org/name") / "blobs" / ("f" * 64 + ".incomplete")
    theirs.write_bytes(b"half")
    for path in (old, web, theirs):
        for each in (path, path.with_name(path.name + ".journal")):
            if each.exists():
                os.utime(each, (LONG_AGO, LONG_AGO))
    assert set(prune()) == {"hf:org/name", f"download of {web}"}
    assert young.exists()
    assert theirs.exists()
    for path in (whole, old, mute, web):
        assert not path.exists()
        assert not path.with_name(path.name + ".journal").exists()


def test_a_repository_that_cannot_be_pruned_is_an_error_and_the_next_one_goes_on(
    stores: Stores, tmp_path: Path
) -> None:
    for name in ("a/linked", "b/name"):
        stores.shared(name, {"m.gguf": ONE}, number=1)
        stores.shared(name, {"m.gguf": TWO}, number=2)
    blobs = stores.repository("a/linked") / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    first, second = prunings()
    assert isinstance(first, LlmrunError)
    assert isinstance(second, Removal)


def test_files_that_go_while_we_look(stores: Stores) -> None:
    gone = stores.root / "gone"
    assert not removal._is_old(gone)
    assert not is_gguf(gone)


def test_a_killed_imports_copy_is_pruned_after_a_week(stores: Stores) -> None:
    left = stores.own(paths.work_folder("import mine").relative_to(stores.models).joinpath("mine.gguf").as_posix(), ONE)
    assert prune() == {}
    os.utime(left, (LONG_AGO, LONG_AGO))
    assert prune() == {f"unfinished files in {left.parent}": len(ONE)}
    assert not left.exists()
