"""Tests of the user's editor: the choice, its arguments, and failures."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.console.programs import edited


@pytest.fixture(autouse=True)
def no_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def install(folder: Path, name: str, does: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{does}\n")
    path.chmod(0o700)
    return path


def test_visual_comes_before_editor_and_both_may_have_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "first", 'echo "first $1" > "$2"')
    install(tmp_path, "second", 'echo "second" > "$1"')
    monkeypatch.setenv("EDITOR", "second")
    assert edited("x") == "second"
    monkeypatch.setenv("VISUAL", "first -w")
    assert edited("x") == "first -w"


def test_a_usual_editor_is_found(tmp_path: Path) -> None:
    install(tmp_path, "nano", 'echo nano >> "$1"')
    assert edited("x\ny") == "x\ny\nnano"


def test_no_file_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "ed", f'echo "$1" > {tmp_path}/name')
    monkeypatch.setenv("EDITOR", "ed")
    assert edited("") == ""
    name = (tmp_path / "name").read_text().strip()
    assert name.endswith(".md")
    assert not Path(name).exists()


@pytest.mark.parametrize(
    ("editor", "said"),
    [
        ("missing", "editor: missing: No such file"),
        ("fails", "editor: fails: exit code 3, so its text was not used"),
        ("bytes", "the saved text: not UTF-8"),
        ("'open", "EDITOR"),
    ],
)
def test_an_editor_that_does_not_work_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editor: str, said: str
) -> None:
    install(tmp_path, "fails", "exit 3")
    install(tmp_path, "bytes", "printf 'a\\377' > \"$1\"")
    monkeypatch.setenv("EDITOR", editor)
    with pytest.raises(UsageError, match=said):
        edited("x")
    assert not list(tmp_path.glob("llmrun-*"))


def test_without_an_editor_the_hint_says_how_to_name_one() -> None:
    with pytest.raises(UsageError, match="none found") as refused:
        edited("x")
    assert "EDITOR" in refused.value.hint


def test_ctrl_c_belongs_to_the_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "ed", f'kill -INT {os.getpid()}; sleep 0.2; echo still here > "$1"')
    monkeypatch.setenv("EDITOR", "ed")
    before = signal.getsignal(signal.SIGINT)
    assert edited("x") == "still here"
    assert signal.getsignal(signal.SIGINT) is before
