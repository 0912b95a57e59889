"""Tests of `llmrun templates`, and of -T in generate and chat, with the real process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun, scripted

pytestmark = pytest.mark.push


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    found = tmp_path / "templates"
    found.mkdir()
    return found


def test_a_template_makes_the_prompt_from_arguments_a_file_or_a_pipe(folder: Path) -> None:
    (folder / "sum.toml").write_text('prompt = "In $language: $input"\ndefaults.language = "English"')
    (folder / "text.txt").write_text("a text\n")
    assert scripted("-q", "-T", "sum", "hello", "world").stdout == b"You said: In English: hello world\n"
    assert scripted("-q", "-T", "sum", stdin=b"piped\n").stdout == b"You said: In English: piped\n"
    path = str(folder / "text.txt")
    assert scripted("-q", "-T", "sum", "-f", path, "-P", "language=$input").stdout == b"You said: In $input: a text\n"


def test_a_whole_prompt_does_not_wait_for_input(folder: Path) -> None:
    """Standard input may be a pipe that is never closed, as under a supervisor."""
    (folder / "joke.toml").write_text('prompt = "Tell a joke."')
    read, write = os.pipe()
    try:
        line = f"exec {shlex.quote(sys.executable)} -m llmrun generate -q --backend scripted -T joke <&{read}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, pass_fds=(read,), check=False)
    finally:
        os.close(read)
        os.close(write)
    assert done.stdout == b"You said: Tell a joke.\n"


def test_settings_of_a_template_hold_unless_typed(folder: Path) -> None:
    (folder / "cold.toml").write_text('system = "Be $how."\ntemperature = 0.25\nmax_tokens = 3')
    done = scripted("-v", "--log", "-T", "cold", "-P", "how=brief", "hi")
    assert b"temperature 0.25" in done.stderr
    assert done.stdout == b"You\n"
    assert scripted("-T", "cold", "-s", "mine", "--log", "-n", "5", "hi").returncode == 0
    first, second = json.loads(llmrun("logs", "--json").stdout)
    assert (first["template"], first["system"], first["max_tokens"]) == ("cold", "Be brief.", 3)
    assert (second["template"], second["system"], second["max_tokens"]) == ("cold", "mine", 5)


def test_missing_and_unknown_variables_are_usage_errors(folder: Path) -> None:
    path = folder.parent / "mine.toml"
    path.write_text('prompt = "$a $b"')
    done = scripted("-T", str(path), "-P", "a=1")
    assert (done.returncode, done.stderr) == (2, b"error: template mine: no value for $b\nhint: -P b=...\n")
    done = scripted("-T", str(path), "-P", "c=1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        b"error: --param: c: template mine has no such variable",
    )


def test_raw_prompts_take_a_template_without_a_system_prompt(folder: Path) -> None:
    (folder / "story.toml").write_text('prompt = "Once upon a $input"')
    (folder / "both.toml").write_text('system = "Be brief."')
    assert scripted("-q", "--raw", "-T", "story", "time").returncode == 0
    done = scripted("--raw", "-T", "both", "time")
    assert (done.returncode, done.stderr[:40]) == (2, b"error: --raw: cannot be combined with a ")


def test_a_chat_takes_system_prompt_and_settings(folder: Path) -> None:
    (folder / "pirate.toml").write_text('prompt = "x $y"\nsystem = "You are a $who."\ntemperature = 0.25')
    done = llmrun("chat", "--backend", "scripted", "-T", "pirate", "-P", "who=pirate", stdin=b"/show\n")
    said = done.stderr.decode()
    assert "note: template pirate: a chat uses only its system prompt and settings, not its prompt" in said
    assert "system      You are a pirate." in said
    assert "temperature 0.25" in said
    done = llmrun("chat", "--backend", "scripted", "-T", "pirate", stdin=b"")
    assert done.stderr.startswith(b"error: template pirate: no value for $who\n")
    quiet = llmrun("chat", "-q", "--backend", "scripted", "-T", "pirate", "-s", "Be brief.", stdin=b"/show system\n")
    assert quiet.stderr == b"system      Be brief.\n"


def test_templates_are_listed_with_their_variables(folder: Path) -> None:
    assert llmrun("templates").stdout.decode().startswith(f"No templates in {folder} yet. ")
    (folder / "a.toml").write_text('prompt = "In $language: $input $x"\nmodel = "m"\ndefaults.language = "French"')
    (folder / "broken.toml").write_text("prompt = 3")
    done = llmrun("templates")
    head, line = done.stdout.decode().splitlines()
    assert head.split() == ["NAME", "MODEL", "VARIABLES", "TEXT"]
    assert line.split(maxsplit=4) == ["a", "m", "language=French", "x", "In $language: $input $x"]
    assert done.stderr.decode() == f"note: template: {folder / 'broken.toml'}: prompt: 3 is not text\n"
    body = json.loads(llmrun("templates", "--json").stdout)
    assert [one["name"] for one in body["templates"]] == ["a", "broken"]
    assert body["templates"][0]["settings"] == {"model": "m"}
    assert "problem" in body["templates"][1]


def test_a_template_is_shown_as_it_is_written(folder: Path) -> None:
    text = 'prompt = "x" # a comment\n'
    (folder / "a.toml").write_text(text)
    assert llmrun("templates", "show", "a").stdout.decode() == text
    assert llmrun("templates", "path").stdout.decode() == f"{folder}\n"
    assert llmrun("templates", "path", "new").stdout.decode() == f"{folder / 'new.toml'}\n"
    missing = llmrun("templates", "show", "aa")
    assert (missing.returncode, missing.stderr) == (
        2,
        b"error: template: aa: no such template\nhint: did you mean a?\n",
    )


def test_a_new_template_begins_as_an_example_that_works(folder: Path) -> None:
    folder.rmdir()
    environment = {**os.environ, "EDITOR": "true", "VISUAL": ""}
    assert llmrun("templates", "edit", "sum", env=environment).returncode == 0
    assert scripted("-q", "-T", "sum", "hi").stdout == b"You said: Summarize in English, in one line: hi\n"
    before = (folder / "sum.toml").read_text()
    llmrun("templates", "edit", "sum", env=environment)
    assert (folder / "sum.toml").read_text() == before


def test_a_usual_editor_is_found_and_the_next_step_shown(folder: Path, tmp_path: Path) -> None:
    editor = tmp_path / "bin" / "vi"
    editor.parent.mkdir()
    editor.write_text('#!/bin/sh\necho \'prompt = "Hi"\' > "$1"\n')
    editor.chmod(0o700)
    environment = {**os.environ, "EDITOR": "", "VISUAL": "", "PATH": str(editor.parent)}
    done = llmrun("templates", "edit", "my commit", env=environment)
    assert (done.returncode, done.stderr) == (0, b"saved; use it with -T 'my commit'\n")
    assert (folder / "my commit.toml").read_text() == 'prompt = "Hi"\n'


def test_what_goes_wrong_in_an_editor_is_told(folder: Path) -> None:
    def edited(editor: str) -> str:
        return llmrun("templates", "edit", "a", env={**os.environ, "EDITOR": editor, "VISUAL": ""}).stderr.decode()

    assert "editor: no-such-editor: No such file" in edited("no-such-editor")
    assert "editor: false: exit code 1, so the template was not checked" in edited("false")
    assert "not valid TOML" in edited("sh -c 'echo nonsense > \"$0\"'")
