"""Tests of the kernel cache, folders, settings and the Hub: the report and the advice for each state."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from llmrun.base.compiled import cache
from llmrun.base.compiled.cache import CacheSurvey
from llmrun.hub.remote.huggingface import Ping
from llmrun.jobs.doctor import folders, interpreter
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Finding, Machine
from llmrun.jobs.doctor.folders import Use, look_at_folders, look_at_kernels, look_at_own_models, look_at_settings
from llmrun.jobs.doctor.interpreter import look_at_hub

HUB = "https://huggingface.co"


# Kernels


def kernels(monkeypatch: pytest.MonkeyPatch, folder: Path, *, entries: int, damaged: int, writable: bool) -> Finding:
    monkeypatch.setattr(cache, "survey", lambda: CacheSurvey(folder, entries, damaged, 40_000))
    monkeypatch.setattr(folders, "can_write", lambda path: writable)
    (found,) = look_at_kernels(Machine())
    return found


def test_a_whole_cache_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels(monkeypatch, tmp_path, entries=3, damaged=0, writable=True)
    assert (found.status, found.words) == (OK, f"3 compiled kernels, 40.0 kB, in {tmp_path}")


def test_an_empty_cache_is_right_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels(monkeypatch, tmp_path, entries=0, damaged=0, writable=True)
    assert (found.status, found.words) == (OK, f"no compiled kernels in {tmp_path}")


def test_damaged_kernels_are_a_note_with_the_command_that_removes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with blank"
    found = kernels(monkeypatch, folder, entries=3, damaged=1, writable=True)
    assert found.status == NOTE
    assert found.words.endswith("; 1 damaged")
    assert shlex.split(found.command) == ["rm", "-r", str(folder)]


def test_a_cache_that_cannot_be_written_is_a_note_with_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kernels(monkeypatch, tmp_path, entries=0, damaged=0, writable=False)
    assert found.status == NOTE
    assert found.words.endswith("which is not writable")
    assert found.command.startswith("export LLMRUN_CACHE_DIR=")


def test_a_cache_that_cannot_be_read_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> CacheSurvey:
        raise PermissionError(13, "Permission denied", "/folder")

    monkeypatch.setattr(cache, "survey", refuse)
    (found,) = look_at_kernels(Machine())
    assert (found.status, found.words) == (NOTE, "compiled kernels cannot be read: /folder: Permission denied")


# Folders


def models(monkeypatch: pytest.MonkeyPatch, use: Use, *, writable: bool = True) -> Finding:
    monkeypatch.setattr(folders, "use_of", lambda path: use)
    monkeypatch.setattr(folders, "can_write", lambda path: writable)
    found, shared = look_at_folders(Machine())
    assert (found.name, shared.name) == ("models", "hub_cache")
    return found


@pytest.mark.parametrize(
    ("use", "status", "words"),
    [
        (Use(2, 10**9, 10**11, True), OK, "models: 1.00 GB in {}, 100 GB free"),
        (Use(0, 0, None, True), OK, "models: no files in {}"),
        (Use(2, 10**9, 10**11, False), OK, "models: more than 1.00 GB in {}, 100 GB free"),
        (Use(2, 10**9, 10**9, True), NOTE, "models: 1.00 GB in {}, 1.00 GB free"),
    ],
)
def test_a_folder_is_told_with_what_it_holds_and_what_is_left(
    use: Use, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path))
    found = models(monkeypatch, use)
    assert (found.status, found.words) == (status, words.format(tmp_path / "models"))
    assert bool(found.advice) == (status == NOTE)


def test_a_folder_that_cannot_be_written_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found = models(monkeypatch, Use(0, 0, 10**12, True), writable=False)
    assert (found.status, found.words[-12:]) == (NOTE, "not writable")
    assert found.command.startswith("export LLMRUN_DATA_DIR=")


# Settings


def settings(monkeypatch: pytest.MonkeyPatch, path: Path) -> Finding:
    monkeypatch.setenv("LLMRUN_CONFIG", str(path))
    (found,) = look_at_settings(Machine())
    return found


def test_a_file_that_is_right_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("threads = 2\n")
    found = settings(monkeypatch, tmp_path / "config.toml")
    assert (found.status, found.words) == (OK, f"read from {tmp_path}/config.toml")


@pytest.mark.parametrize(
    ("text", "advice"),
    [("thread = 2", "Did you mean threads?"), ("threads = 'two'", "Fix {}."), ("threads = [", "Fix {}.")],
)
def test_a_file_that_is_refused_is_a_problem(
    text: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    found = settings(monkeypatch, path)
    assert (found.status, found.advice) == (PROBLEM, advice.format(path))
    assert str(path) in found.words


def test_a_file_that_is_named_and_not_there_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(monkeypatch, tmp_path / "none.toml").advice == "Unset LLMRUN_CONFIG."


def test_no_file_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (found,) = look_at_settings(Machine())
    assert (found.status, found.facts["exists"]) == (OK, False)


def own_models(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Finding:
    (folder / "models.toml").write_text(text)
    monkeypatch.setenv("LLMRUN_CONFIG", str(folder / "config.toml"))
    (found,) = look_at_own_models(Machine())
    return found


def test_presets_and_models_of_the_user_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = own_models(monkeypatch, tmp_path, '[presets.pirate]\nmodel = "qwen3:4b"\n')
    assert (found.status, found.words) == (OK, f"0 models and 1 preset in {tmp_path}/models.toml")
    assert found.facts["presets"] == ["pirate"]


@pytest.mark.parametrize(
    ("text", "words", "advice"),
    [
        ("[presets.p]\nmodel = 'm'\ntemprature = 1", "presets.p: temprature", "Did you mean temperature?"),
        ("[presets.p]\nmodel = 3", "presets.p: model: 3", "Fix {}."),
        ("[models.x]\nlicense = 3", "x: license: 3", "Fix {}."),
        ("[", "not valid TOML", "Fix {}."),
    ],
)
def test_a_models_file_that_is_refused_is_a_problem(
    text: str, words: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = own_models(monkeypatch, tmp_path, text)
    assert (found.status, found.advice) == (PROBLEM, advice.format(tmp_path / "models.toml"))
    assert words in found.words


def test_all_broken_entries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = own_models(monkeypatch, tmp_path, "[models.x]\nlicense = 3\n[presets.p]\nmodel = 3\n")
    assert found.words == (
        f"invalid: catalogue: {tmp_path}/models.toml: line 1: x: license: 3 is not one line of text; "
        "line 3: presets.p: model: 3 is not the name of a model"
    )


def test_a_missing_models_file_is_not_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    assert [*look_at_own_models(Machine())] == []


# Network


def hub(monkeypatch: pytest.MonkeyPatch, reach: Ping) -> tuple[Finding, Finding]:
    monkeypatch.setattr(interpreter, "ping_hub", lambda *, offline: reach)
    found, token = look_at_hub(Machine())
    assert (found.name, token.name) == ("hub", "token")
    return found, token


def test_a_hub_that_answers_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found, token = hub(monkeypatch, Ping(HUB, 0.12, "", False, True, ("https_proxy", "no_proxy")))
    assert (found.status, found.words) == (OK, "huggingface.co answers in 120 ms through https_proxy")
    assert (token.status, token.words) == (OK, "a Hugging Face token is set up")


def test_a_hub_that_does_not_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found, token = hub(monkeypatch, Ping(HUB, None, "Connection refused", False, False, ("no_proxy",)))
    assert (found.status, found.words) == (NOTE, "huggingface.co cannot be reached: Connection refused")
    assert found.advice
    assert token.status == OK


def test_a_hub_without_an_address_has_a_name_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = hub(monkeypatch, Ping("", None, "huggingface_hub cannot be imported: HF_ENDPOINT", False, False, ()))
    assert found.words.startswith("the Hugging Face Hub cannot be reached: huggingface_hub cannot be imported")


def test_offline_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = hub(monkeypatch, Ping(HUB, None, "", True, False, ()))
    assert (found.status, found.words) == (NOTE, "huggingface.co was not contacted: offline mode")
