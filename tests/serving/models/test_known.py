"""Tests of the names that requests may use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import ModelNotFound
from llmrun.options.presets import Preset
from llmrun.serving.models.known import KnownModel, KnownModels, public_name

GIVEN = KnownModel("mine", Path("/models/mine.gguf"))


def in_store() -> Iterator[KnownModel]:
    for reference in ("qwen3:4b", "hf:owner/name:Q4_K_M", "/models/mine.gguf", "/other/mine.gguf", "/other/new.gguf"):
        path = Path(reference if reference.startswith("/") else f"/hub/{reference}.gguf")
        yield KnownModel(public_name(reference, path), path, reference, 10, 1.0)


def find(name: str) -> KnownModel:
    aliases = {"qwen3": "qwen3:4b", "q": "qwen3:4b", "llama": "llama3:8b"}
    return asyncio.run(KnownModels([GIVEN], in_store, aliases.get).find(name))


@pytest.mark.parametrize("name", ["qwen3:4b", "QWEN3:4B", "qwen3", "q"])
def test_models_in_the_store_have_their_names_and_aliases(name: str) -> None:
    assert find(name).reference == "qwen3:4b"


def test_the_list_has_each_name_and_file_once() -> None:
    listed = asyncio.run(KnownModels([GIVEN], in_store, lambda name: None).listed())
    assert [model.name for model in listed] == ["mine", "qwen3:4b", "owner/name:Q4_K_M", "new"]
    assert find("mine").is_given


@pytest.mark.parametrize("name", ["new", "new:latest", "owner/name:Q4_K_M"])
def test_other_names_are_those_of_the_list(name: str) -> None:
    assert find(name).name == name.removesuffix(":latest")


@pytest.mark.parametrize(
    "name",
    [
        *("/models/mine.gguf", "/other/new.gguf", "./new.gguf", "new.gguf", "../../etc/passwd"),
        *("hf:owner/name:Q4_K_M", "hf:owner/other", "hf.co/owner/name", "https://example.com/model.gguf"),
        *("llama", "llama3:8b", "gpt-4o", "\x00", "x" * 100_000),
    ],
)
def test_nothing_else_is_found(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        find(name)
    assert len(str(caught.value)) < 200
    assert caught.value.hint == "this server has 'mine', 'qwen3:4b', 'owner/name:Q4_K_M', 'new'"


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("qwen3:4b", "qwen3:4b"),
        ("hf:owner/name:Q8_0", "owner/name:Q8_0"),
        ("hf:owner/name/sub/file.gguf", "owner/name/sub/file.gguf"),
        ("https://example.com/a/file.gguf", "file"),
        ("ollama:llama3:8b", "ollama:llama3:8b"),
        ("/home/me/file.gguf", "file"),
    ],
)
def test_public_names_hide_where_files_are(reference: str, name: str) -> None:
    assert public_name(reference, Path("/home/me/file.gguf")) == name


def test_presets_are_names_of_models() -> None:
    presets = [
        Preset("Pirate", "qwen3"),
        Preset("owner/name:Q4_K_M", "mine"),  # hides the model with this name
        Preset("file", "/other/new.gguf"),
        Preset("hub", "hf:owner/name:Q4_K_M"),
        Preset("missing", "llama3:8b"),
    ]
    aliases = {"qwen3": "qwen3:4b", "llama3:8b": "llama3:8b"}
    known = KnownModels([GIVEN], in_store, aliases.get, presets)

    async def found() -> dict[str, str]:
        return {model.name: model.reference for model in await known.listed() if model.preset is not None}

    assert asyncio.run(found()) == {
        "Pirate": "qwen3:4b",
        "owner/name:Q4_K_M": "",
        "file": "/other/new.gguf",
        "hub": "hf:owner/name:Q4_K_M",
    }
    assert asyncio.run(known.find("PIRATE")).preset is presets[0]
