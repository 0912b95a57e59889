"""Tests that incomplete, hostile and pickled checkpoints are refused with an error of one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.base.errors import LlmrunError, ModelFileError, ModelNotFound, UnsupportedModel
from llmrun.jobs.converting.checkpoint import Checkpoint
from tests.support.converting.checkpoints import save_safetensors, save_shards, tiny_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint().write(tmp_path / "model")


def refusal(folder: Path, kind: type[LlmrunError] = ModelFileError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return str(caught.value)


def test_a_file_with_another_name_is_found(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
    with Checkpoint(folder) as checkpoint:
        assert "model.norm.weight" in checkpoint.tensors


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "weights.pkl"])
def test_pickle_files_are_refused_by_name(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder, UnsupportedModel)
    assert f"{folder / name}: pickle files can run any code when they are read" in message


def test_pickle_files_beside_safetensors_are_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    Checkpoint(folder).__exit__(None, None, None)


def test_folders_without_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no safetensors files in this folder" in refusal(folder, ModelNotFound)


def test_several_files_need_an_index(folder: Path) -> None:
    save_safetensors(folder / "a.safetensors", {})
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    assert f"2 safetensors files, but no {INDEX}" in refusal(folder)


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "the folder contains no config.json" in refusal(folder, ModelNotFound)


def test_files_and_missing_folders_are_refused(folder: Path) -> None:
    assert "not a folder" in refusal(folder / "config.json")
    assert "no such folder" in refusal(folder / "nowhere", ModelNotFound)


def test_names_on_the_hub_get_the_command_that_downloads_them() -> None:
    with pytest.raises(ModelNotFound) as caught:
        Checkpoint(Path("Owner/Name-AWQ"))
    assert caught.value.hint == "download the model first: hf download Owner/Name-AWQ --local-dir Name-AWQ"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "invalid JSON"),
        (b"[]", "must contain an object, not an array"),
        (b"\xff", "is not UTF-8 text: byte 0 is invalid"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', 'the key "a" occurs twice'),
        (b'{"a": ["\\ud800"]}', "has text with an unpaired surrogate"),
        (b'{"a":' + b"[" * 200_000, "nested too deeply"),
        (b'{"a":[' + b"[]," * 4_000_000 + b"[]]}", "the JSON has more than 8,000,000 commas and brackets"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer has 5,000 digits"),
    ],
)
def test_broken_configs_are_refused(content: bytes, message: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    assert message in refusal(folder)


def test_huge_json_files_are_refused(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert "has 67,108,865 bytes, but files of its kind have at most 67,108,864" in refusal(folder)


def test_a_single_file_beats_a_stale_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    with Checkpoint(folder) as checkpoint:
        assert "model.norm.weight" in checkpoint.tensors


def sharded(folder: Path) -> dict[str, str]:
    """Split the weights into two files, and return the map of the index."""
    save_shards(folder, tiny_checkpoint().tensors, lambda name: f"{'norm' in name}.safetensors")
    placed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return placed


def misplace(placed: dict[str, str]) -> None:
    placed["model.norm.weight"] = "False.safetensors"


def invent(placed: dict[str, str]) -> None:
    placed["model.invented"] = "False.safetensors"


def forget(placed: dict[str, str]) -> None:
    del placed["model.norm.weight"]


def escape(placed: dict[str, str]) -> None:
    placed["model.norm.weight"] = "../model/True.safetensors"


def unpickle(placed: dict[str, str]) -> None:
    placed["model.norm.weight"] = "True.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (misplace, f"model.norm.weight is in this file, but {INDEX} does not place it here"),
        (invent, f"False.safetensors: model.invented is missing, but {INDEX} names it"),
        (forget, f"model.norm.weight is in this file, but {INDEX} does not place it here"),
        (escape, "must name .safetensors files in this folder, not '../model/True.safetensors'"),
        (unpickle, "must name .safetensors files in this folder, not 'True.bin'"),
        (dict.clear, "weight_map must name 1 to 1000 files, not 0"),
    ],
)
def test_wrong_indexes_are_refused(change: Callable[[dict[str, str]], None], message: str, folder: Path) -> None:
    placed = sharded(folder)
    change(placed)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert message in refusal(folder)


def test_too_many_shards_for_the_process_get_a_hint(folder: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs resource limits")
    import resource

    sharded(folder)
    os.close(next_descriptor := os.dup(0))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor + 1, before[1]))
    try:
        with pytest.raises(ModelFileError, match="Too many open files") as caught:
            Checkpoint(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "ulimit -n" in caught.value.hint


def test_a_missing_shard_is_named(folder: Path) -> None:
    sharded(folder)
    (folder / "True.safetensors").unlink()
    assert "True.safetensors: No such file or directory" in refusal(folder, ModelNotFound)
