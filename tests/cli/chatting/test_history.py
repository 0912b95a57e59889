"""Tests of the prompt history on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.chatting import keyboard
from llmrun.cli.chatting.keyboard import StoredHistory
from llmrun.cli.console.output import out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.jsonl"


def entries(path: Path) -> list[str]:
    """Return the entries that a new chat loads, oldest first."""
    return [*StoredHistory(path).load_history_strings()][::-1]


def test_entries_come_back_in_order_and_are_the_users_own(path: Path) -> None:
    stored = StoredHistory(path)
    for text in ("one", "two\nlines", "\x1b[31m\u2028", '"""'):
        stored.append_string(text)
    assert entries(path) == ["one", "two\nlines", "\x1b[31m\u2028", '"""']
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.push
@given(st.lists(st.text(min_size=1, max_size=30), max_size=5, unique=True))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    stored = StoredHistory(path)
    for text in texts:
        stored.append_string(text)
    assert entries(path) == texts


def test_a_repeated_entry_is_kept_once(path: Path) -> None:
    stored = StoredHistory(path)
    for text in ("a", "a", "b", "a"):
        stored.append_string(text)
    assert entries(path) == ["a", "b", "a"]


def test_an_entry_that_was_cut_short_spoils_itself_alone(path: Path) -> None:
    StoredHistory(path).append_string("before")
    with path.open("ab") as file:
        file.write(b'"half an ent')
    StoredHistory(path).append_string("after")
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n[1]\n7\n")
    assert entries(path) == ["before", "after"]


@pytest.mark.push
def test_the_file_forgets_its_older_half(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyboard, "LARGEST", 2000)
    stored = StoredHistory(path)
    for n in range(500):
        stored.append_string(f"entry number {n}")
        assert path.stat().st_size <= 2000
    assert entries(path)[-1] == "entry number 499"
    assert len(entries(path)) >= 40
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_book_is_not_an_entry(path: Path) -> None:
    stored = StoredHistory(path)
    stored.append_string("x" * keyboard.LONGEST)
    stored.append_string("short")
    assert entries(path) == ["short"]


def append(path: Path, name: str) -> None:
    for n in range(50):
        StoredHistory(path).append_string(f"{name} {n}")


@pytest.mark.night
def test_several_chats_append_without_losing_an_entry(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    chats = [context.Process(target=append, args=(path, name)) for name in "abc"]
    for chat in chats:
        chat.start()
    for chat in chats:
        chat.join()
    assert [chat.exitcode for chat in chats] == [0, 0, 0]
    assert sorted(entries(path)) == sorted(f"{name} {n}" for name in "abc" for n in range(50))


@pytest.mark.parametrize("trouble", ["a file for a folder", "a folder for a file", "a full disk"])
def test_what_cannot_be_written_is_said_once(
    path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if trouble == "a file for a folder":
        path.parent.write_text("")
    elif trouble == "a folder for a file":
        path.mkdir(parents=True)
    else:
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    monkeypatch.setattr(out, "quiet", False)
    stored = StoredHistory(path)
    stored.append_string("one")
    stored.append_string("two")
    said = capsys.readouterr().err
    assert said.count("note: history: ") == 1
    assert stored.get_strings() == ["one", "two"]


def test_a_line_of_the_file_is_json(path: Path) -> None:
    StoredHistory(path).append_string("ä\n")
    assert json.loads(path.read_text()) == "ä\n"
