"""Tests that files in llmrun's own folder have names, and that every name in the list leads to its file."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmrun.base.errors import ModelNotFound
from llmrun.engine.remote.request import is_endpoint
from llmrun.hub.local.own_models import find_own, own_models
from llmrun.hub.local.stored_models import find
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.model_file import LocalPath, existing, resolve, understand
from llmrun.hub.upkeep.inventory import models, select
from llmrun.options.settings import model_named
from tests.support.hub.model_stores import Stores, gguf

NFC, NFD = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
ODD_NAMES = (
    "Mixed Case v1.5",
    "qwen3:4b",
    "tiny:1b",
    "smollm2",
    "pirate",
    "Small",
    "hf:org",
    "hf:org/name",
    "ollama:x",
    "http:",
    "localhost",
    "127.0.0.1:8080",
    "mine:8080",
    "mine:7b",
    "-m",
    " spaces around ",
    "a, b",
    "~",
    "mmproj-mine",
    "x-00001-of-00002",
    "x-00002-of-00002",
    "x",
    "CON",
    NFC,
    NFD,
    "\u6a21\u578b",
    "team/big",
    "TEAM/BIG",
    "web/m",
    "received/m",
    "a/b/c/d/e/f",
    "x.gguf",
    ".hidden",
    "$HOME",
    "pull",
    "latest",
)
Names = st.sampled_from(ODD_NAMES) | st.text("aZ0 ._-:/\u00e9\u6a21", min_size=1, max_size=12)
OWN_TOML = """
[presets.pirate]
model = "qwen3:4b"
[presets."tiny:2b"]
model = "qwen3:4b"
[shortnames]
small = "hf:org/name:Q8_0"
[models."tiny:1b"]
description = "a model in the cache"
license = "MIT"
repository = "org/name"
quants.Q4_0 = { file = "m-Q4_0.gguf" }
[models."tiny:2b"]
description = "a model in the cache, hidden by a preset"
license = "MIT"
repository = "org/name"
quants.Q8_0 = { file = "m-Q8_0.gguf" }
"""


def meant_by(name: str) -> Path | None:
    """Return the file that commands such as `chat NAME` open."""
    asked = model_named(name)
    assert not is_endpoint(asked)
    meant = understand(asked)
    return meant.path if isinstance(meant, LocalPath) else find(meant, Silent())


@pytest.mark.push
@example(list(ODD_NAMES))
@given(st.lists(Names, max_size=6))
def test_every_name_in_the_list_leads_to_its_file(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        stores = Stores(Path(folder))
        stores.enter(patch)
        (stores.root / "models.toml").write_text(OWN_TOML)
        stores.shared("org/name", {"m-Q8_0.gguf": gguf(salt=999), "m-Q4_0.gguf": gguf(salt=998)})
        for number, name in enumerate(names):
            with contextlib.suppress(OSError):  # Windows does not allow all of these names
                if not {"..", "."} & {*name.split("/")}:
                    stores.own(f"{name.lstrip('/')}.gguf", gguf(salt=number))
        found = models()
        assert len({model.name.lower() for model in found}) == len(found)
        for model in found:
            assert select(model.name, found) == model
            assert meant_by(model.name) == model.path, model.name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mine.gguf", "mine"),
        ("Mine Too v1.5.GGUF", "Mine Too v1.5"),
        ("team/big.gguf", "team/big"),
        ("qwen3.gguf", "qwen3"),  # a file takes precedence over the catalogue, like a model in the user's models.toml
        ("\u6a21\u578b-Q4_0.gguf", "\u6a21\u578b-Q4_0"),
    ],
)
def test_a_file_in_the_folder_has_its_own_name(stores: Stores, file: str, name: str) -> None:
    path = stores.own(file, gguf())
    assert [model.name for model in models()] == [name]
    for typed in (name, name.upper(), f"{name}.gguf", file):
        assert resolve(typed, offline=True, reporter=Silent()).path == path
    assert resolve(name, offline=True, reporter=Silent()).name == name
    assert models()[0].used > 0


def test_shards_in_the_folder_share_one_name(stores: Stores) -> None:
    shards = [stores.own(f"big-Q8_0-0000{number}-of-00002.gguf", gguf(salt=number)) for number in (1, 2)]
    (model,) = models()
    assert (model.name, model.files) == ("big-Q8_0", tuple(shards))
    for typed in ("big-q8_0", "big-Q8_0.gguf", "big-Q8_0-00001-of-00002.gguf"):
        assert meant_by(typed) == shards[0]
    shards[1].unlink()
    assert models() == []


def test_a_file_in_the_current_folder_comes_before_a_name_with_gguf(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.own("mine.gguf", gguf())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.gguf").write_bytes(gguf(salt=1))
    assert meant_by("mine.gguf") == Path("mine.gguf")
    assert meant_by("mine") == stores.models / "mine.gguf"


def test_misspelled_names_get_a_suggestion_from_the_folder(stores: Stores) -> None:
    stores.own("sales-helper.gguf", gguf())
    with pytest.raises(ModelNotFound) as caught:
        understand("sales-heper")
    assert caught.value.hint == "did you mean sales-helper?"


def test_letters_with_accents_match_in_both_forms(stores: Stores) -> None:
    path = stores.own(f"{NFD}.gguf", gguf())
    assert meant_by(NFC) == path


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")
def test_a_link_to_a_missing_file_is_named_as_such(stores: Stores) -> None:
    (stores.root / "gone.gguf").write_bytes(gguf())
    stores.models.mkdir(parents=True)
    (stores.models / "mine.gguf").symlink_to(stores.root / "gone.gguf")
    (stores.models / "folder.gguf").symlink_to(stores.root)
    assert [model.name for model in models()] == ["mine"]
    (stores.root / "gone.gguf").unlink()
    assert models() == []
    (own,) = own_models()
    assert own == find_own("mine")
    assert own.target == str(stores.root / "gone.gguf")
    meant = understand("mine")
    assert isinstance(meant, LocalPath)
    with pytest.raises(ModelNotFound, match=r"model: 'mine': a link to .*gone\.gguf, which does not exist") as caught:
        existing(meant)
    assert caught.value.hint.startswith("`llmrun rm mine` removes the link; ")
