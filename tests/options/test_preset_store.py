"""Tests of changing presets: the rest of models.toml does not change, and nothing invalid is written."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import ModelNotFound, UsageError
from llmrun.options.preset_store import add_preset, change_preset, remove_preset, stored_preset
from llmrun.options.settings import load_presets

REST = """# My file, with odd   spacing
[models . "mine:1b"]   # a comment
description = '''
[presets.not_this_one]
'''
license="MIT"
quants.Q8_0 = { url = "https://example.org/m.gguf" }

# about the pirate
[presets.pirate]
model = "m"   # why
# top_k = 3

# about the cook
[presets.cook]
model = "m"
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's models.toml, which does not exist yet."""
    for name in [name for name in os.environ if name.startswith("LLMRUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.toml").touch()
    return tmp_path / "models.toml"


@pytest.mark.parametrize("text", [None, "", REST, "\ufeff" + REST, REST.replace("\n", "\r\n"), REST.rstrip("\n")])
def test_adding_and_removing_keeps_all_other_bytes(own: Path, text: str | None) -> None:
    if text is not None:
        own.write_bytes(text.encode())
    table = {"model": "q", "system": 'one\ntwo "three"', "temperature": 0.5, "think": False, "lora": ["/a.gguf:1.0"]}
    assert add_preset("New.1", table | {"variables": {"a b": {"c": [1, True]}}}) == own
    after = own.read_bytes()
    assert after.startswith((text or "").encode())
    if text and "\r\n" in text:
        assert after.count(b"\n") == after.count(b"\r\n")
    found = load_presets()["new.1"]
    assert (found.model, found.system, found.values["temperature"]) == ("q", 'one\ntwo "three"', 0.5)
    assert (found.variables, found.loras) == ({"a b": {"c": [1, True]}}, ("/a.gguf:1.0",))
    assert remove_preset("NEW.1") == own
    assert own.read_bytes().decode().rstrip("\r\n") == (text or "").rstrip("\r\n")


def test_removing_keeps_the_comments_of_its_neighbours(own: Path) -> None:
    own.write_text(REST)
    remove_preset("pirate")
    gone = '[presets.pirate]\nmodel = "m"   # why\n# top_k = 3\n'
    assert own.read_text() == REST.replace(gone, "")


def test_removing_keeps_the_blank_lines_between_tables(own: Path) -> None:
    own.write_text("[presets.a]\nseed = 1\n[presets.b]\nseed = 2\n\n[presets.c]\nseed = 3\n")
    remove_preset("b")
    assert own.read_text() == "[presets.a]\nseed = 1\n\n[presets.c]\nseed = 3\n"
    remove_preset("a")
    assert own.read_text() == "[presets.c]\nseed = 3\n"


def test_an_existing_preset_is_replaced_only_with_force(own: Path) -> None:
    own.write_text(REST)
    with pytest.raises(UsageError, match="preset: pirate: already exists") as caught:
        add_preset("Pirate", {"model": "q"})
    assert "llmrun preset edit pirate" in caught.value.hint
    assert own.read_text() == REST
    add_preset("Pirate", {"model": "q"}, force=True)
    old = '[presets.pirate]\nmodel = "m"   # why\n# top_k = 3\n'
    assert own.read_text() == REST.replace(old, '[presets.Pirate]\nmodel = "q"\n')


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("x.gguf", {"model": "m"}, "is not a name of letters"),
        ("p", {"model": "m", "top_k": -3}, "preset: p: top_k: -3 is not an integer"),
        ("p", {"model": "pirate"}, "preset: p: model: 'pirate' is another preset"),
        ("p", {"prompt": "$5"}, "preset: p: prompt: line 1: '\\$5' is not a variable"),
    ],
)
def test_invalid_presets_are_not_written(own: Path, name: str, table: dict[str, object], words: str) -> None:
    own.write_text(REST)
    with pytest.raises(UsageError, match=words):
        add_preset(name, table)
    assert own.read_text() == REST


def test_a_changed_text_replaces_only_the_preset(own: Path) -> None:
    own.write_text(REST)
    before = stored_preset("PIRATE")
    assert before.text == '[presets.pirate]\nmodel = "m"   # why\n# top_k = 3\n'
    new = before.text + "seed = 1\n[presets.pirate.variables]\nx = 1\n"
    change_preset(before, new)
    assert own.read_text() == REST.replace(before.text, new)
    with pytest.raises(UsageError, match="another program has changed the preset"):
        change_preset(before, new)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[presets.pirate]\nmodel = ", "not valid TOML: Invalid value"),
        ("[presets.pirate]\nmodle = 'm'\nseed = 1", "preset: pirate: modle: no such setting"),
        ("[presets.other]\nmodel = 'm'", r"the text must contain only \[presets.pirate\]"),
        ("[presets.pirate]\nmodel = 'm'\n[families.qwen3]\nusual = '4b'", "the text must contain only"),
        ("presets.pirate = 3", "preset: pirate: 3 is not a table"),
        ("", "the text must contain only"),
    ],
)
def test_a_text_that_is_not_the_preset_is_refused(own: Path, text: str, words: str) -> None:
    own.write_text(REST)
    with pytest.raises(UsageError, match=words):
        change_preset(stored_preset("pirate"), text)
    assert own.read_text() == REST


def test_a_broken_preset_can_be_fixed(own: Path) -> None:
    own.write_text("[presets.p]\nmodel = 3\n")
    change_preset(stored_preset("p"), "[presets.p]\nmodel = 'm'")
    assert load_presets()["p"].model == "m"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# mine\npresets = { p = { model = 'm' } }\n", 2),
        ("[presets]\np = { model = 'm' }\n", 2),
        ("presets.p.model = 'm'\n", 1),
        ("[presets.p]\nmodel = 'm'\n[presets.q]\nmodel = 'm'\n[presets.p.variables]\nx = 1\n", 1),
    ],
)
def test_other_forms_of_tables_are_left_to_the_user(own: Path, text: str, line: int) -> None:
    own.write_text(text)
    for change in (remove_preset, stored_preset, lambda name: add_preset(name, {"model": "m"}, force=True)):
        with pytest.raises(UsageError, match=f"models.toml: line {line}: p: written in a form"):
            change("p")
    assert own.read_text() == text


def test_links_and_modes_are_kept(own: Path, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles" / "mine.toml"
    target.parent.mkdir()
    target.write_text(REST)
    target.chmod(0o640)
    own.symlink_to(target)
    add_preset("p", {"model": "m"})
    assert own.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [path.name for path in target.parent.iterdir()] == ["mine.toml"]
    assert "p" in load_presets()


def test_concurrent_changes_lose_nothing(own: Path) -> None:
    names = [f"p{number}" for number in range(8)]
    threads = [threading.Thread(target=add_preset, args=(name, {"model": "m"})) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(load_presets()) == names


def test_template_files_are_presets_too(own: Path) -> None:
    folder = own.with_name("templates")
    folder.mkdir()
    path = folder / "my Sum.toml"
    path.write_text('prompt = "$input"\n')
    with pytest.raises(UsageError, match="my sum: already exists: "):
        add_preset("my sum", {"model": "m"}, force=True)
    before = stored_preset("MY sum")
    with pytest.raises(UsageError, match=r"my Sum\.toml: promt: no such setting"):
        change_preset(before, "promt = 'x'")
    change_preset(before, 'prompt = "Sum: $input"')
    assert load_presets()["my sum"].prompt == "Sum: $input"
    assert [each.name for each in folder.iterdir()] == ["my Sum.toml"]
    assert remove_preset("my sum") == path
    assert [*folder.iterdir()] == []


def test_a_missing_preset_gets_a_suggestion(own: Path) -> None:
    own.write_text(REST)
    for change in (remove_preset, stored_preset):
        with pytest.raises(ModelNotFound, match="preset: 'pirat': no such preset") as caught:
            change("pirat")
        assert caught.value.hint == "did you mean pirate?"


@given(st.text(min_size=1))
def test_any_system_prompt_is_read_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    own = Path(os.environ["LLMRUN_CONFIG"]).with_name("models.toml")
    own.unlink(missing_ok=True)
    add_preset("p", {"model": "m", "system": text})
    assert load_presets()["p"].system == text
