"""Tests that `llmrun doctor --paths` lists everything that llmrun writes (docs/uninstalling.md)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from llmrun.cli.completing import installed
from tests.support.cli.commands import llmrun, on_terminal

pytestmark = pytest.mark.push


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home directory that is in use, without variables that name other folders."""
    for name in ("LLMRUN_CACHE_DIR", "LLMRUN_DATA_DIR", "LLMRUN_CONFIG", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_removing_the_listed_paths_leaves_nothing(home: Path) -> None:
    (home / ".config" / "llmrun").mkdir(parents=True)
    (home / ".config" / "llmrun" / "config.toml").write_text("color = 'never'\n")
    (home / ".config" / "llmrun" / "models.toml").write_text("[presets.pirate]\nmodel = 'qwen3:4b'\n")
    (home / ".bashrc").write_text(f"{installed.SHELLS['bash'].line}\n")
    prompts, answers = home / "prompts.jsonl", home / "answers.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    for arguments, stdin in (
        (["chat", "--backend", "scripted"], b"one\ntwo\n"),
        (["generate", "--backend", "scripted", "--log", "hello"], b""),
        (["batch", str(prompts), "-o", str(answers), "--backend", "scripted"], b""),
    ):
        done = llmrun(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
    for mine in (prompts, answers):
        mine.unlink()
    chat = on_terminal("chat", "--backend", "scripted")
    chat.expect_exact("/help lists the commands")
    chat.send("hello\r/exit\r")
    chat.read()
    written = files_in(home)
    assert len(written) > 7
    listed = json.loads(llmrun("doctor", "--paths", "--json").stdout)["paths"]
    sizes = {place["path"]: place["bytes"] for place in listed if place["exists"]}
    assert all(sizes[str(home / name)] > 0 for name in (".bashrc", ".config/llmrun/config.toml"))
    assert [place["path"] for place in listed if place["shared"]] == [
        str(home / ".cache" / "huggingface" / "hub"),
        str(home / ".bashrc"),
    ]
    assert llmrun("completion", "--remove").returncode == 0
    for place in listed:
        path = Path(place["path"])
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".bashrc":
            path.unlink(missing_ok=True)
    assert files_in(home) == [".bashrc"]
    assert (home / ".bashrc").read_text() == ""


@pytest.mark.parametrize("columns", ["100", "60"])
def test_the_list_names_each_path_with_its_size_and_contents(
    home: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    model = home / ".local" / "share" / "llmrun" / "models" / "tiny.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(bytes(1_500_000))
    text = llmrun("doctor", "--paths").stdout.decode()
    assert "1.50 MB  ~/.local/share/llmrun/models" in text
    assert "      -  ~/.config/llmrun/config.toml" in text
    assert "settings" in text
    assert max(map(len, text.splitlines())) <= int(columns)
