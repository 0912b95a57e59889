"""Tests of `llmrun preset` as users type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun, on_terminal, run
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.hub.model_stores import Stores

pytestmark = pytest.mark.push


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's models.toml, which does not exist yet, next to a config.toml for the scripted backend."""
    Stores(tmp_path).enter(monkeypatch)
    (tmp_path / "config.toml").write_text('backend = "scripted"\n')
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("VISUAL", raising=False)
    return tmp_path / "models.toml"


def editor(monkeypatch: pytest.MonkeyPatch, folder: Path, does: str) -> None:
    path = folder / "my-editor"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o700)
    monkeypatch.setenv("EDITOR", str(path))


def test_an_added_preset_works_at_once(own: Path) -> None:
    out, err = run("preset", "add", "Pirate", "-m", "smollm2", "-s", "Be a\npirate.", "--temp", "0.5", "-n", "3")
    assert out == f"Pirate: saved in {own}\n"
    assert err == "note: to use the preset: llmrun chat -m Pirate\n"
    expected = (
        '[presets.Pirate]\nmodel = "smollm2"\nsystem = """\nBe a\npirate."""\ntemperature = 0.5\nmax_tokens = 3\n'
    )
    assert own.read_text() == expected
    out, err = run("generate", "-v", "-m", "pirate", "hi")
    assert (out, "temperature 0.5" in err) == ("You\n", True)


def test_likely_mistakes_get_a_note(own: Path) -> None:
    err = run("preset", "add", "where", "--prompt", "In which country is {city}?")[1]
    assert "note: {city} is not a variable of the prompt; variables are written as $city\n" in err
    assert "note: the preset hides the model smollm2\n" in run("preset", "add", "smollm2", "-m", "qwen3:4b")[1]
    assert "hides" not in run("preset", "add", "smollm2", "-m", "gemma3:1b", "--force")[1]
    assert own.read_text().count("[presets.") == 2


def test_a_preset_of_an_imported_model_keeps_its_name(own: Path, tmp_path: Path) -> None:
    run("import", str(tiny_llama(tmp_path / "original.gguf")), "mine")
    run("preset", "add", "short", "-m", "mine", "-n", "3")
    assert 'model = "mine"' in own.read_text()


def test_every_part_of_a_preset_has_a_flag(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    arguments = [
        "--prompt",
        "In $language: $input",
        "-P",
        "language=French",
        "--no-think",
        "--seed",
        "7",
        "--top-k",
        "4",
    ]
    arguments += ["--chat-template-kwargs", '{"style": [1], "☃🎉": 2}', "--lora", "a.gguf:0.5", "--hide-thinking"]
    monkeypatch.chdir(tmp_path)
    done = llmrun("preset", "add", "all", "-m", "./m.gguf", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (preset,) = json.loads(run("list", "--json")[0])["presets"]
    assert preset == {
        "name": "all",
        "model": str(tmp_path / "m.gguf"),
        "prompt": "In $language: $input",
        "defaults": {"language": "French"},
        "settings": {"top_k": 4, "seed": 7, "think": False, "hide_thinking": True},
        "variables": {"style": [1], "☃🎉": 2},
        "lora": [f"{tmp_path}/a.gguf:0.5"],
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["p"], 2, "preset: p: nothing to save\nhint: add a model (-m), "),
        (["p", "-m", "smolm2:135m"], 4, "did you mean smollm2:135m"),
        (["p", "-m", "./missing.gguf"], 4, "no such file"),
        (["p", "-m", "there"], 2, "model: 'there' is another preset\nhint: name its model: smollm2\n"),
        (["p", "--temp", "500"], 2, "preset: p: temperature: 500.0 is not a number from 0 to 100"),
        (["p", "--ctx-size", "5"], 2, "--ctx-size: no such option"),
        (["there", "-m", "smollm2"], 2, "preset: there: already exists"),
        (["p", "-s", "x", "--chat-template-kwargs", '{"a": null}'], 2, "models.toml cannot contain null\nhint: leave"),
    ],
)
def test_mistakes_write_nothing(own: Path, arguments: list[str], code: int, words: str) -> None:
    own.write_text('[presets.there]\nmodel = "smollm2"\n')
    assert words in run("preset", "add", *arguments, code=code)[1]
    assert own.read_text() == '[presets.there]\nmodel = "smollm2"\n'


def test_removing_a_preset_keeps_the_others(own: Path) -> None:
    own.write_text("[presets.a]\nseed = 1\n\n[presets.b]\nseed = 2\n\n[presets.c]\nseed = 3\n")
    out, err = run("preset", "rm", "A", "zzz", "c", code=4)
    assert out == f"A: removed from {own}\nc: removed from {own}\n"
    assert err.startswith("error: preset: 'zzz': no such preset\n")
    assert own.read_text() == "[presets.b]\nseed = 2\n"


def test_edit_opens_the_text_of_the_preset(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# mine\n[presets.a]\nseed = 1  # one\n\n# next\n[presets.b]\nseed = 2\n"
    own.write_text(text)
    editor(monkeypatch, tmp_path, f'case "$1" in *.toml) cp "$1" {tmp_path}/seen; sed -i s/1/9/ "$1";; esac')
    assert run("preset", "edit", "A")[0] == f"a: saved in {own}\n"
    assert (tmp_path / "seen").read_text() == "[presets.a]\nseed = 1  # one\n"
    assert own.read_text() == text.replace("seed = 1", "seed = 9")
    editor(monkeypatch, tmp_path, "true")
    assert run("preset", "edit", "a") == ("", "note: a: unchanged\n")


def test_an_invalid_edit_keeps_the_old_preset(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text("[presets.a]\nseed = 1\n")
    editor(monkeypatch, tmp_path, 'sed -i s/seed/sed/ "$1"')
    _, err = run("preset", "edit", "a", code=2)
    assert "error: preset: a: " in err
    assert err.endswith("note: a: not saved\n")
    editor(monkeypatch, tmp_path, "exit 3")
    assert "exit code 3, so its text was not used" in run("preset", "edit", "a", code=2)[1]
    assert own.read_text() == "[presets.a]\nseed = 1\n"


def test_an_invalid_edit_can_be_edited_again(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text("[presets.a]\nseed = 1\n")
    editor(
        monkeypatch, tmp_path, 'if grep -q "= x" "$1"; then sed -i "s/= x/= 5/" "$1"; else sed -i "s/= 1/= x/" "$1"; fi'
    )
    process = on_terminal("preset", "edit", "a")
    process.expect_exact("TOML: Invalid value")
    process.expect_exact("Edit again? [Y/n] ")
    process.sendline("")
    process.expect_exact("a: saved in ")
    process.wait()
    assert own.read_text() == "[presets.a]\nseed = 5\n"


def test_the_group_names_the_commands_that_show_presets() -> None:
    _, err = run("preset", "list", code=2)
    hint = "hint: `llmrun list` lists your presets, and `llmrun show NAME` shows one\n"
    assert err == f"error: no such command 'list'\n{hint}"
    out = run("preset", "--help")[0]
    assert "`llmrun list` lists your" in out
    assert all(f"  {name} " in out for name in ("add", "edit", "rm"))
