"""Tests of copying through the system's program, tmux or the terminal itself."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.console import programs as programs_module
from llmrun.cli.console.output import out
from llmrun.cli.console.programs import copy_text

TEXT = "a naïve text\nof two lines"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the whole PATH, in an environment without a clipboard."""
    for variable in ("WAYLAND_DISPLAY", "DISPLAY", "TMUX", "SSH_TTY", "SSH_CONNECTION"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the sequences written to the terminal."""
    told: list[str] = []
    monkeypatch.setattr(programs_module, "can_move_cursor", lambda stream: True)
    monkeypatch.setattr(out, "sequence", told.append)
    return told


def install(folder: Path, name: str, code: int = 0) -> None:
    """Install a program that saves its input and arguments."""
    path = folder / name
    path.write_text(f'#!/bin/sh\n/bin/cat > {folder}/{name}.got\necho "$@" > {folder}/{name}.arguments\nexit {code}\n')
    path.chmod(0o700)


@pytest.mark.parametrize(
    ("variable", "name", "arguments"),
    [
        ("WAYLAND_DISPLAY", "wl-copy", ""),
        ("DISPLAY", "xclip", "-selection clipboard"),
        ("DISPLAY", "xsel", "--clipboard --input"),
    ],
)
def test_the_program_of_the_session_gets_the_text(
    programs: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str, arguments: str
) -> None:
    install(programs, name)
    monkeypatch.setenv(variable, ":0")
    assert copy_text(TEXT) == f"to the clipboard with {name}"
    assert (programs / f"{name}.got").read_text(encoding="utf-8") == TEXT
    assert (programs / f"{name}.arguments").read_text() == f"{arguments}\n"


def test_macos_has_pbcopy(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "pbcopy")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert copy_text(TEXT) == "to the clipboard with pbcopy"


def test_a_program_that_fails_is_passed_over(
    programs: Path, monkeypatch: pytest.MonkeyPatch, sequences: list[str]
) -> None:
    install(programs, "xclip", code=1)
    monkeypatch.setenv("DISPLAY", ":0")
    assert "OSC 52" in copy_text(TEXT)
    assert len(sequences) == 1


def test_the_terminal_is_asked_with_osc_52(programs: Path, sequences: list[str]) -> None:
    assert copy_text(TEXT) == "to the terminal's clipboard (OSC 52), if the terminal allows it"
    assert sequences == [f"\x1b]52;c;{base64.b64encode(TEXT.encode()).decode()}\x07"]


def test_over_ssh_the_terminal_is_asked_and_no_program_there(
    programs: Path, monkeypatch: pytest.MonkeyPatch, sequences: list[str]
) -> None:
    install(programs, "xclip")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SSH_TTY", "/dev/pts/0")
    assert "OSC 52" in copy_text(TEXT)
    assert not (programs / "xclip.got").exists()


def test_tmux_gets_the_text_into_its_buffer(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "tmux")
    monkeypatch.setenv("TMUX", "/tmp/tmux,1,0")
    assert copy_text(TEXT) == "to tmux's buffer, and to the clipboard if the terminal allows it"
    assert (programs / "tmux.got").read_text(encoding="utf-8") == TEXT
    assert (programs / "tmux.arguments").read_text() == "load-buffer -w -\n"


def test_an_old_tmux_hands_the_sequence_on(
    programs: Path, monkeypatch: pytest.MonkeyPatch, sequences: list[str]
) -> None:
    install(programs, "tmux", code=1)
    monkeypatch.setenv("TMUX", "/tmp/tmux,1,0")
    copy_text("hi")
    assert sequences == ["\x1bPtmux;\x1b\x1b]52;c;aGk=\x07\x1b\\"]


def test_more_than_a_terminal_takes_is_refused(programs: Path, sequences: list[str]) -> None:
    with pytest.raises(UsageError, match="74,995 bytes exceed"):
        copy_text("x" * 74_995)
    copy_text("x" * 74_994)
    assert len(sequences[0]) <= 100_000


def test_without_a_terminal_and_a_program_there_is_no_clipboard(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs_module, "can_move_cursor", lambda stream: False)
    with pytest.raises(UsageError, match="no clipboard found"):
        copy_text(TEXT)
