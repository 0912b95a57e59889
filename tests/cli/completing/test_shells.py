"""Tests of the scripts in real shells, which type a line, press Tab and print the completed line."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX shells", allow_module_level=True)

from tests.support.cli.commands import LLMRUN, TIMEOUT_S, llmrun
from tests.support.hub.model_stores import Stores, gguf

pytestmark = pytest.mark.push

TAB, TELL = "\t", "\x18\x04"  # Ctrl-X Ctrl-D is bound to print the line between brackets
KILL = "\x15"
QUIET = {"PS1": "$ ", "TERM": "dumb", "HISTFILE": ""}
START = {
    "bash": (["--norc", "--noprofile", "-i"], """bind -x '"\\C-x\\C-d": printf "<<%s>>" "$READLINE_LINE"'"""),
    "zsh": (["-f", "-i"], 'tell() { print -rn -- "<<$BUFFER>>" }; zle -N tell; bindkey -e; bindkey "^X^D" tell'),
}
LINES = [
    ("llmrun gen", "llmrun generate "),
    ("llmrun help bench comp", "llmrun help bench compare "),
    ("llmrun chat --backend ll", "llmrun chat --backend llama "),
    ("llmrun chat --backend=ll", "llmrun chat --backend=llama "),
    ("llmrun run qwen3:4b-i", "llmrun run qwen3:4b-instruct "),
    ("llmrun chat -m hf:or", "llmrun chat -m hf:org/name:Q4_0 "),
    ("llmrun bench -m qwen3:4b-i", "llmrun bench -m qwen3:4b-instruct "),
    ("llmrun generate 'it is' -m qwen3:4b-t", "llmrun generate 'it is' -m qwen3:4b-thinking "),
    ("llmrun generate -f a_fil", "llmrun generate -f a_file.txt "),
    ("llmrun bench --html=a_fil", "llmrun bench --html=a_file.txt "),
    ("llmrun chat ./a_fil", "llmrun chat ./a_file.txt "),
    ("llmrun rm a_fil", "llmrun rm a_fil"),
    ("llmrun generate --fi", "llmrun generate --file "),
]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    """Set up a folder with a file, a model, and `llmrun` on the PATH."""
    stores = Stores(tmp_path / "stores")
    stores.shared("org/name", {"name-Q4_0.gguf": gguf()})
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "llmrun"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(LLMRUN)} "$@"\n')
    command.chmod(0o755)
    stores.enter(monkeypatch)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("a_file.txt").touch()
    return stores


class Shell:
    """An interactive shell that has evaluated its completion script."""

    def __init__(self, name: str) -> None:
        flags, binding = START[name]
        self._process = pexpect.spawn(name, flags, dimensions=(50, 300), timeout=TIMEOUT_S, encoding="utf-8")
        # The echoed command line has "rea""dy", and only its output has "ready".
        self._process.sendline(f'{binding}; eval "$(llmrun completion {name})"; echo rea""dy')
        self._process.expect("ready")

    def complete(self, line: str) -> str:
        self._process.send(line + TAB + TELL)
        self._process.expect(r"<<(.*?)>>")
        found = self._process.match
        assert isinstance(found, re.Match)
        self._process.send(KILL)
        return str(found[1])

    def close(self) -> None:
        self._process.close(force=True)


def check_lines(name: str) -> None:
    shell = Shell(name)
    try:
        assert [shell.complete(line) for line, _ in LINES] == [expected for _, expected in LINES]
    finally:
        shell.close()


@pytest.mark.night
def test_bash_completes(environment: Stores) -> None:
    check_lines("bash")


def test_bash_quotes_names(environment: Stores) -> None:
    """The name of a model is never run as a command."""
    environment.own("it's $(touch evil).gguf", gguf())
    shell = Shell("bash")
    try:
        line = shell.complete("llmrun rm it")
    finally:
        shell.close()
    typed = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    assert typed.stdout.splitlines()[-1] == "it's $(touch evil)"
    assert not Path("evil").exists()


@pytest.mark.night
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(environment: Stores) -> None:
    check_lines("zsh")


@pytest.mark.night
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(environment: Stores) -> None:
    """fish has a command that prints the candidates."""
    script = Path("llmrun.fish")
    script.write_bytes(llmrun("completion", "fish").stdout)
    offered = []
    for line, _ in LINES:
        program = f"source llmrun.fish; complete -C {shlex.quote(line)}"
        done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        offered.append([each.partition("\t")[0] for each in done.stdout.splitlines()])
    script.unlink()
    words = [expected.strip().rpartition(" ")[2] if line != expected.strip() else None for line, expected in LINES]
    assert offered == [[word] if word else [] for word in words]
