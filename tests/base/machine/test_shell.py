"""Tests of commands for pasting, in either shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.base.machine import shell


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


def test_another_folder_is_new_and_nobody_elses(tmp_path: Path) -> None:
    """llmrun executes machine code from this folder, so a world-writable folder with a predictable name would be
    unsafe.
    """
    if sys.platform == "win32":
        pytest.skip("needs a POSIX shell")
    command = shell.another_folder("LLMRUN_CACHE_DIR") + '; stat -c %a "$LLMRUN_CACHE_DIR"; ls -A "$LLMRUN_CACHE_DIR"'
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=True, env={"TMPDIR": str(tmp_path), "PATH": "/bin"}
    )
    assert done.stdout == "700\n"


@pytest.mark.usefixtures("windows")
def test_windows_has_other_words() -> None:
    assert shell.another_folder("HF_HOME") == '$env:HF_HOME="$env:TEMP\\llmrun"'
    assert shell.unset("A") == "Remove-Item Env:A"
    assert shell.remove(Path("a folder")) == 'Remove-Item -Recurse "a folder"'
    assert shell.words(["python", "-m", "a b"]) == 'python -m "a b"'
    assert shell.words(["C:\\a b\\python.exe", "-m"]) == '& "C:\\a b\\python.exe" -m'
    assert shell.setting("A", "$b 'c'") == "$env:A = '$b ''c'''"
    assert shell.writing(Path("a/b"), "$c 'd'")[1].endswith(" -Value '$c ''d'''")
    assert shell.quoted('$a "b" `c`') == '"`$a `"b`" ``c``"'


def test_a_variable_is_set_for_one_command() -> None:
    if sys.platform == "win32":
        pytest.skip("needs a POSIX shell")
    command = shell.with_variable("A", "-x='1 2'", [sys.executable, "-c", "import os; print(os.environ['A'])"])
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "-x='1 2'\n"


_SHOW = "import os; print(os.environ['A'], end='')"


@pytest.mark.parametrize("text", ["", "$HOME `id` 'a' \"b\"\n%s \\n"])
def test_settings_and_files_keep_every_character(tmp_path: Path, text: str) -> None:
    if sys.platform == "win32":
        pytest.skip("needs a POSIX shell")
    path = tmp_path / "a folder" / "file"
    commands = [shell.setting("A", text), *shell.writing(path, text), shell.words([sys.executable, "-c", _SHOW])]
    done = subprocess.run(["sh", "-ec", "\n".join(commands)], capture_output=True, text=True, check=True)
    assert done.stdout == text
    assert path.read_text() == f"{text}\n"
