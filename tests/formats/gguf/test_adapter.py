"""Tests of reading LoRA adapters: each wrong file is refused in one line that names the file and the problem."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, ModelFileError
from llmrun.formats.gguf.adapter import EMBEDDING, open_adapter
from llmrun.formats.gguf.reader import open_gguf
from tests.support.models.tiny_adapters import tiny_adapter
from tests.support.models.tiny_models import changed_copy, tiny_model
from tests.support.tiers import examples

Q = "blk.0.attn_q.weight"


def refusal(model: Path, adapter: Path) -> str:
    """Return the message with which an adapter is refused."""
    with open_gguf(model) as file, pytest.raises(ModelFileError) as caught:
        open_adapter(adapter, file)
    message = str(caught.value)
    assert "\n" not in message
    assert adapter.name in message
    return message


def test_an_adapter_has_its_parts(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "F32 untied llama3 rope")
    path = tiny_adapter(
        tmp_path / "a.gguf", model, rank=8, alpha=16.0, adapter__alora__invocation_tokens=np.array([5, 9], np.uint32)
    )
    with open_gguf(model) as file:
        adapter = open_adapter(path, file)
    adapter.file.close()
    assert adapter.invocation == (5, 9)
    assert adapter.factor(8) == 2.0
    a, b = adapter.pairs[Q]
    assert (a.shape, b.shape) == ((64, 8), (8, 64))
    a, b = adapter.pairs[EMBEDDING]
    assert (a.shape[0], b.shape) == (8, (8, 64))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general__type": "model"}, "general.type is model, not adapter"),
        ({"general__type": None}, "general.type is missing"),
        ({"adapter__type": "control_vector"}, "adapter.type is control_vector"),
        ({"general__architecture": "qwen3"}, "general.architecture is qwen3, not llama"),
        ({"adapter__lora__alpha": float("nan")}, "must be finite"),
        ({"adapter__lora__alpha": 16}, "must have type f32, not u32"),
        ({"adapter__alora__invocation_tokens": [1, 2]}, "must have type arr[u32], not arr[i32]"),
        ({"adapter__alora__invocation_tokens": np.array([1 << 30], np.uint32)}, "the model's vocabulary of"),
        (
            {"adapter__alora__invocation_tokens": np.ones(1001, np.uint32)},
            "must be 1 to 1,000 tokens of the model's vocabulary of",
        ),
        ({"rank": 1025}, "the rank must be 1 to 1,024, not 1,025"),
        ({"names": [EMBEDDING]}, "the model uses this matrix for its output, too"),
        ({"names": []}, "the adapter has none"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    model = tiny_model(tmp_path, "F32")
    assert words in refusal(model, tiny_adapter(tmp_path / "a.gguf", model, **{"names": [Q], **keys}))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{Q}.lora_b": None}, f"{Q}.lora_b: the tensor is missing"),
        (
            {"blk.9.attn_q.weight.lora_a": (4, 64), "blk.9.attn_q.weight.lora_b": (64, 4)},
            "the model has no such tensor",
        ),
        ({f"{Q}.lora_a": (4, 32)}, "the shape must be 64 x 4, not 32 x 4"),
        ({f"{Q}.lora_b": (32, 4)}, "the shape must be 4 x 64, not 4 x 32"),
        ({f"{Q}.lora_a": (5, 64)}, "the shape must be 64 x 4, not 64 x 5"),
        ({"blk.0.attn_norm.weight": (64,)}, "only .lora_a and .lora_b can be applied"),
        (
            {"blk.0.attn_norm.weight.lora_a": (4, 64), "blk.0.attn_norm.weight.lora_b": (1, 4)},
            "adapters cannot change it",
        ),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, tensors: dict[str, tuple[int, ...] | None], words: str) -> None:
    model = tiny_model(tmp_path, "F32")
    right = tiny_adapter(tmp_path / "right.gguf", model, names=[Q])

    def change(metadata: dict[str, Any], own: dict[str, Any]) -> None:
        for name, shape in tensors.items():
            own.pop(name, None)
            if shape is not None:
                own[name] = ("F32", np.zeros(shape, np.float32))

    assert words in refusal(model, changed_copy(right, tmp_path / "wrong.gguf", change))


@pytest.mark.push
@given(data=st.data())
@settings(max_examples=examples(200))
def test_damaged_files_raise_only_our_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp()
    model = folder / "model.gguf"
    if not model.exists():
        tiny_model(folder, "F32").rename(model)
        tiny_adapter(folder / "whole.gguf", model, names=[Q])
    whole = bytearray((folder / "whole.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, min(len(whole), 700) - 1))] = data.draw(st.integers(0, 255))
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(whole)
    with open_gguf(model) as file, contextlib.suppress(LlmrunError):
        open_adapter(damaged, file).file.close()
