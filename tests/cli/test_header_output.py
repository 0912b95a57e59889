"""Tests of what `show` says about draft heads, adapters and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrun.cli.show_output import _model, _sections
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.tiny_adapters import changed_tensors, tiny_adapter
from tests.support.models.tiny_architecture import TinyArchitecture
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_encoders import TINY_ENCODERS, TINY_RERANKERS, tiny_encoder
from tests.support.models.tiny_models import changed_copy

HEAD = "qwen35 layers by name, with a layer ahead"


def shown(path: Path) -> str | None:
    with open_gguf(path) as file:
        return dict(_model(file)).get("draft head")


def test_heads_that_are_used_are_told(tmp_path: Path) -> None:
    assert (shown(tiny_architecture(tmp_path, HEAD)) or "").startswith("used by the CPU engine")


@pytest.mark.parametrize(
    ("without", "words"),
    [("nextn.eh_proj", "not used: the CPU engine supports one layer"), ("nextn.hnorm", "not used: tensor missing: ")],
)
def test_heads_that_are_not_used_are_told(tmp_path: Path, without: str, words: str) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if without in name)]

    found = shown(changed_copy(tiny_architecture(tmp_path, HEAD), tmp_path / "changed.gguf", change))
    assert found is not None
    assert found.startswith(words)


def test_models_without_a_head_say_nothing(tmp_path: Path) -> None:
    assert shown(tiny_architecture(tmp_path, "qwen3")) is None


def sections(path: Path) -> dict[str, dict[str, str]]:
    with open_gguf(path) as file:
        return {title: dict(fields) for title, fields in _sections(file, "name", None)}


def test_adapters_show_what_they_change(tmp_path: Path) -> None:
    model = tiny_architecture(tmp_path, "llama Mistral Nemo")
    found = sections(tiny_adapter(tmp_path / "adapter.gguf", model, rank=8, alpha=16.0))
    assert "Chat template" not in found
    about = found["File"]
    assert about["kind"] == "a LoRA adapter"
    assert (about["rank"], about["alpha"]) == ("8", "16")
    assert about["changes"] == f"{len(changed_tensors(model))} tensors"
    assert "title" not in about


@pytest.mark.parametrize(
    ("rows", "words"),
    [(TINY_ENCODERS, "pooling cls (llmrun embed)"), (TINY_RERANKERS, "ranks documents (llmrun rerank)")],
)
def test_embedding_models_name_their_command(tmp_path: Path, rows: dict[str, TinyArchitecture], words: str) -> None:
    assert sections(tiny_encoder(tmp_path, rows["bert"]))["Model"]["embeddings"] == words
