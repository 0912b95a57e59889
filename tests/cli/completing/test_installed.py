"""Tests of `llmrun completion --remove`, which undoes what users typed to install completion."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from llmrun.cli.completing import installed
from tests.support.cli.commands import llmrun

RC = "export EDITOR=vi\n{line}\nalias ll='ls -l'  # \udce9\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_lines_are_removed_and_everything_else_is_kept(home: Path) -> None:
    real = home / "dotfiles"
    real.write_bytes(RC.format(line=installed.SHELLS["bash"].line).encode("utf-8", "surrogateescape"))
    real.chmod(0o640)
    (home / ".bashrc").symlink_to(real)
    (home / ".zshrc").write_text("# eval $(llmrun completion zsh) is not for me\n")
    assert [place.path for place in installed.installed()] == [home / ".bashrc"]
    assert installed.remove() == [home / ".bashrc"]
    assert real.read_bytes() == b"export EDITOR=vi\nalias ll='ls -l'  # \xe9\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert (home / ".bashrc").is_symlink()
    assert installed.remove() == []


def test_without_a_home_folder_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert installed.remove() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shown_instructions_are_undone(shell: str, home: Path) -> None:
    """Run the command that `llmrun completion` shows, with a stand-in for llmrun."""
    program = home / "bin" / "llmrun"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho a script\n")
    program.chmod(0o755)
    command = installed.SHELLS[shell].command
    path = f"{program.parent}:{Path(shutil.which('mkdir') or '').parent}"
    subprocess.run(["sh", "-c", command], check=True, env={"HOME": str(home), "PATH": path})
    assert len(list(installed.installed())) == 1
    assert installed.remove() == [home / installed.SHELLS[shell].file]
    assert list(installed.installed()) == []
    assert [path for path in home.rglob("*") if path.is_file() and path != program and path.read_text()] == []


@pytest.mark.push
def test_remove_says_which_files_it_changed(home: Path) -> None:
    (home / ".zshrc").write_text(f"{installed.SHELLS['zsh'].line}\n")
    assert llmrun("completion", "--remove").stdout.decode() == f"removed completion from {home}/.zshrc\n"
    assert llmrun("completion", "--remove").stdout.decode() == "No shell loads llmrun's completion.\n"
    refused = llmrun("completion", "--remove", "zsh")
    assert refused.stderr.decode().startswith("error: completion: --remove applies to all shells\n")
