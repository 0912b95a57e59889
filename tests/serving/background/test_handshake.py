"""Tests of the messages of the handshake, which all versions of llmrun must understand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmrun
from llmrun.base.processes.frames import BadMessage
from llmrun.serving.background import handshake
from llmrun.serving.background.eligibility import Standing
from llmrun.serving.background.handshake import LEAVING, build_id, greeting, read_greeting

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_the_words_of_the_handshake_never_change() -> None:
    """An older engine must understand a newer client, and vice versa."""
    names = ("HELLO", "WELCOME", "REFUSED", "LEAVING", "INFO", "STOP", "STOPPING", "BUSY")
    assert [getattr(handshake, name) for name in names] == [name.lower() for name in names]
    assert json.loads(greeting("stop", force=True)) == {"message": "stop", "force": True}


@given(st.text(), st.dictionaries(st.text().filter(lambda key: key not in ("message", "kind")), JSON, max_size=4))
def test_a_greeting_is_read_as_it_was_written(kind: str, values: dict[str, object]) -> None:
    assert read_greeting(greeting(kind, **values)) == (kind, {"message": kind, **values})


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_a_bad_message(data: bytes) -> None:
    try:
        kind, values = read_greeting(data)
    except BadMessage:
        return
    assert kind == str(values["message"])


def test_deep_json_is_a_bad_message() -> None:
    with pytest.raises(BadMessage):
        read_greeting(b"[" * 200_000)


def test_the_end_of_a_connection_counts_as_leaving() -> None:
    assert read_greeting(None)[0] == LEAVING


def test_a_standing_survives_the_handshake() -> None:
    ours = Standing.of_this_process()
    _, values = read_greeting(greeting("hello", standing=ours.as_json()))
    assert Standing.from_json(values["standing"]) == ours


def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that the package is in this folder, with one module."""
    (folder / "llmrun" / "engine").mkdir(parents=True)
    for name in ("__init__.py", "engine/module.py", "models.toml"):
        (folder / "llmrun" / name).write_text("x = 1\n")
    monkeypatch.setattr(llmrun, "__file__", str(folder / "llmrun" / "__init__.py"))
    return folder / "llmrun"


def test_the_build_is_the_same_for_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, monkeypatch)
    before = build_id()
    (tmp_path / "llmrun" / "engine" / "module.pyc").touch()
    assert build_id() == before


@pytest.mark.parametrize("name", ["engine/module.py", "models.toml"])
def test_a_changed_file_is_another_build(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = package(tmp_path, monkeypatch) / name
    before = build_id()
    os.utime(changed, ns=(1, 1))
    assert build_id() != before


def test_another_folder_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "one", monkeypatch)
    before = build_id()
    package(tmp_path / "other", monkeypatch)
    assert build_id() != before


def test_an_installed_package_is_known_by_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, monkeypatch)
    record = tmp_path / "llmrun_gguf-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.touch()
    before = build_id()
    os.utime(tmp_path / "llmrun" / "models.toml", ns=(1, 1))
    assert build_id() == before
    os.utime(record, ns=(1, 1))
    assert build_id() != before
