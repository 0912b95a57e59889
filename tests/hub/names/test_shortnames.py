"""Tests that RamaLama's short-name files are read as RamaLama reads them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmrun.hub.names import ramalama_folders, ramalama_target


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return RamaLama's user folders; tests use names that no installed file contains."""
    found = {}
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        found[variable] = tmp_path / variable / "ramalama"
        found[variable].mkdir(parents=True)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    return found


def write(folder: Path, text: str) -> None:
    (folder / "shortnames.conf").write_text(text, "utf-8")


def test_the_user_the_packages_and_the_system_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/anna")
    assert {Path("/home/anna/.config"), Path("/etc"), Path("/usr/share"), Path("/usr/local/share")} <= {
        *ramalama_folders()
    }


def test_a_name_of_no_file_stands_for_nothing(folders: dict[str, Path]) -> None:
    assert ramalama_target("llmrun-test") is None


def test_quotes_cases_and_comments_are_as_ramalama_has_them(folders: dict[str, Path]) -> None:
    text = """
# a comment
[shortnames]
  "LLMrun-test" = "hf://owner/repo/a%20b.gguf"
  llmrun-plain = ollama://a:b
  'llmrun:1b' = 'hf://owner/repo'
[other]
  "llmrun-other" = "hf://x/y"
"""
    write(folders["XDG_CONFIG_HOME"], text)
    assert ramalama_target("llmrun-TEST") == "hf://owner/repo/a%20b.gguf"
    assert ramalama_target("llmrun-plain") == "ollama://a:b"
    assert ramalama_target("llmrun:1b") == "hf://owner/repo"
    assert ramalama_target("llmrun-other") is None


def test_a_later_file_wins(folders: dict[str, Path]) -> None:
    write(folders["XDG_CONFIG_HOME"], '[shortnames]\n"llmrun-test" = "hf://first/repo"\n')
    write(folders["XDG_DATA_HOME"], '[shortnames]\n"llmrun-test" = "hf://second/repo"\n')
    assert ramalama_target("llmrun-test") == "hf://second/repo"


@pytest.mark.parametrize(
    "text", ["", "no heading", "[shortnames", "[shortnames]\nno value\n", "[shortnames]\n=\n", "\0"]
)
def test_a_file_that_cannot_be_read_has_no_names(folders: dict[str, Path], text: str) -> None:
    write(folders["XDG_CONFIG_HOME"], text)
    assert ramalama_target("llmrun-test") is None


def test_bytes_that_are_no_text_have_no_names(folders: dict[str, Path]) -> None:
    (folders["XDG_CONFIG_HOME"] / "shortnames.conf").write_bytes(b"\xff\xfe[shortnames]")
    assert ramalama_target("llmrun-test") is None


def test_windows_has_places_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    monkeypatch.setenv("APPDATA", "/roaming")
    assert [str(folder) for folder in ramalama_folders()][1:] == ["/local", "/roaming"]
