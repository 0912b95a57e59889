"""Tests of the disk space that saved states take up."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrun.engine.saved_state.budget import Budget, abandoned, note_uses, stored_states

DAY = 86_400


def state(folder: Path, name: str, n_bytes: int = 100, used: float = 0) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(n_bytes))
    os.utime(path, (used, used))
    return path


def test_the_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    chats, prefixes = tmp_path / "chats", tmp_path / "prefixes"
    old, newer, newest = state(chats, "a.kv", used=3), state(prefixes, "b.kv", used=2), state(chats, "c.kv", used=1)
    note_uses([newest])
    other = state(chats, "a.jsonl")
    budget = Budget([chats, prefixes], 350)
    assert budget.make_room(chats / "d.kv", 50)
    assert old.exists()
    assert budget.make_room(chats / "d.kv", 100)
    assert (old.exists(), newer.exists(), newest.exists(), other.exists()) == (True, False, True, True)
    assert budget.make_room(chats / "d.kv", 340)
    assert not old.exists()
    assert not newest.exists()


def test_nothing_is_removed_if_it_would_not_help(tmp_path: Path) -> None:
    file = state(tmp_path, "a.kv")
    assert not Budget([tmp_path], 350).make_room(tmp_path / "b.kv", 351)
    assert not Budget([tmp_path], 350).make_room(file, 251)
    assert Budget([tmp_path], 350).make_room(file, 250)
    assert file.exists()


def test_states_take_up_at_most_a_tenth_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    state(tmp_path, "a.kv")
    budget = Budget([tmp_path], 1 << 40)
    assert budget.make_room(tmp_path / "b.kv", 10)
    assert (tmp_path / "a.kv").exists()
    assert not budget.make_room(tmp_path / "b.kv", 111)
    assert budget.make_room(tmp_path / "b.kv", 110)
    assert not (tmp_path / "a.kv").exists()


def test_folders_that_do_not_exist_are_empty(tmp_path: Path) -> None:
    assert stored_states([tmp_path / "none"]) == []


def test_states_without_a_conversation_and_old_ones_are_abandoned(tmp_path: Path) -> None:
    chats, prefixes, now = tmp_path / "chats", tmp_path / "prefixes", 100 * DAY
    lost = state(chats, "lost.kv", used=now)
    left = state(chats, ".kept.kv.new", used=now)
    old = state(chats, "old.kv", used=now - 31 * DAY)
    state(chats, "old.jsonl")
    state(chats, "kept.kv", used=now - 29 * DAY)
    state(chats, "kept.5f2c81d0.kv", used=now)
    state(chats, "kept.jsonl")
    stale = state(prefixes, "stale.kv", used=now - 31 * DAY)
    state(prefixes, "fresh.kv", used=now)
    assert {each.path for each in abandoned(chats, prefixes, now)} == {lost, left, old, stale}
