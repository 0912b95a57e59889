"""Paths, names, and what is said about those that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.errors import LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.reporter import Silent
from llmrun.hub.resolve import ResolvedModel, is_path, resolve
from tests.support.fake_hub import MODEL
from tests.support.resolving import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose folders this process uses too."""
    machine = Machine(tmp_path)
    machine.catalogue("tiny", "hf:good/repo/model.gguf")
    for name, value in machine.environment().items():
        if name.startswith(("LLMRUN_", "HF_")) or name == "HOME":
            monkeypatch.setenv(name, value)
    return machine


@pytest.mark.parametrize("name", ["my.gguf", "MY.GGUF", "with space.gguf"])
def test_a_path_is_the_file_itself(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"GGUF")
    assert resolve(name, reporter=Silent()) == ResolvedModel(Path(name), None)
    assert resolve(f"./{name}", reporter=Silent()).path.samefile(name)
    assert resolve(str(tmp_path / name), reporter=Silent()).path == tmp_path / name


def test_a_path_with_another_ending_is_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "blob"), reporter=Silent()).path == tmp_path / "blob"


def test_a_path_may_begin_at_home(machine: Machine) -> None:
    (machine.root / "my.gguf").write_bytes(b"GGUF")
    assert resolve("~/my.gguf", reporter=Silent()).path == machine.root / "my.gguf"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.gguf", "no such file"),
        ("./missing", "no such file"),
        ("~nobody-of-that-name/x.gguf", "no such file"),
        ("/", "is a folder, not a file"),
        ("a" * 5000 + ".gguf", "name too long"),
        ("nul\0.gguf", ""),
    ],
)
def test_a_path_to_nothing_is_not_found(name: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name, reporter=Silent())
    assert said in str(caught.value).lower()
    assert "\0" not in str(caught.value)
    assert caught.value.hint


def test_a_file_without_the_ending_needs_a_path(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(machine.root)
    Path("weights").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound) as caught:
        resolve("weights", reporter=Silent())
    assert "./weights" in caught.value.hint


def test_a_model_that_was_copied_into_the_data_folder_is_used(machine: Machine) -> None:
    machine.models.mkdir(parents=True)
    (machine.models / "model.gguf").write_bytes(MODEL)
    got = resolve("tiny", offline=True, reporter=Silent())
    assert got.path == machine.models / "model.gguf"
    assert got.entry is not None
    assert got.entry.name == "tiny"


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", None])
def test_offline_and_not_here_is_said_with_the_size(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(variable, "true")
    with pytest.raises(NetworkError, match=rf"tiny: not on this machine \({len(MODEL):,} bytes") as caught:
        resolve("tiny", offline=variable is None, reporter=Silent())
    assert "offline" in caught.value.hint.lower()
    assert not machine.models.exists()


@given(st.text(max_size=40).filter(lambda name: name.lower() not in {"smollm2", "smollm2:135m"}))
def test_any_other_text_is_not_found_in_one_line(name: str) -> None:
    if is_path(name) and Path(name.replace("\0", "")).exists():
        return
    with pytest.raises(LlmrunError) as caught:
        resolve(name, offline=True, reporter=Silent())
    assert str(caught.value).isprintable()
