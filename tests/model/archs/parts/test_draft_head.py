"""Tests of the plans of draft heads: against llama.cpp, and with files that lack parts of the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF, ModelFileError, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts import draft_head
from llmrun.model.archs.parts.architecture import draft_plan_of_header, plan_of_header
from llmrun.model.plan import reference
from tests.soak.model_mutations import OF_METADATA, OF_TENSORS
from tests.support.gguf.gguf_files import Tensor, tiny_vocabulary, write_gguf
from tests.support.gguf.gguf_memory import read_gguf
from tests.support.models.fidelity import head_plan_of
from tests.support.models.llama_cpp_oracle import LlamaCppModel
from tests.support.models.model_drafts import draft_of
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from tests.support.models.tiny_models import changed_copy

DENSE = "qwen35 layers by name, with a layer ahead"
NEXT = "qwen3next, with a layer ahead"
HEADS = (
    DENSE,
    "qwen35moe fused, with a layer ahead",
    NEXT,
    "glm4moe",
    "deepseek2 GLM-4.7-Flash, fused, with a layer ahead",
)
TOKENS = 60


def written(folder: Path, name: str) -> Path:
    if name != NEXT:
        return tiny_architecture(folder, name)
    row, ahead = TINY_ARCHITECTURES["qwen3next older"], TINY_ARCHITECTURES["qwen35moe fused, with a layer ahead"]
    row = replace(
        row,
        layers=4,
        keys={**row.keys, "nextn_predict_layers": 1, "expert_shared_feed_forward_length": 64},
        others={**row.others, 3: ahead.others[2]},
    )
    vocabulary = tiny_vocabulary()
    tensors = row.tensors("F32", len(vocabulary.tokens))
    return write_gguf(folder / "next.gguf", row.metadata() | vocabulary.metadata(), tensors)


def changed(path: Path, *, without: str = "", **tensors: Tensor) -> Path:
    """Write a copy of a model whose head lacks the tensors of this name, or has other ones instead."""

    def change(metadata: dict[str, Any], found: dict[str, Tensor]) -> None:
        for name in [name for name in found if without and without in name]:
            del found[name]
        block = f"blk.{metadata[metadata['general.architecture'] + '.block_count'] - 1}"
        found |= {f"{block}.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}

    return changed_copy(path, path.with_name("changed.gguf"), change)


def given_states(width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal((TOKENS, width)).astype(np.float32)


@pytest.mark.parametrize("name", HEADS)
def test_the_twin_means_what_llama_cpp_says(tmp_path: Path, name: str) -> None:
    """Allow 5e-6 of the logits' range (at most 2.6e-7 was measured)."""
    path, tokens = written(tmp_path, name), [int(token) for token in np.random.default_rng(0).integers(3, 290, TOKENS)]
    plan = head_plan_of(path)
    assert plan is not None
    assert plan.given is not None
    given = given_states(plan.given.width)
    with LlamaCppModel.head_oracle(path) as oracle:
        expected = oracle.logits(tokens, given)
    found = reference.exact(plan, np.array(tokens, np.int32), given=given)
    assert np.abs(found - expected).max() <= 5e-6 * np.ptp(expected)


def test_a_head_may_have_matrices_of_its_own(tmp_path: Path) -> None:
    """Otherwise, it uses those of the model, and the model's last norm if it has none."""
    path = tiny_architecture(tmp_path, DENSE)
    shared = head_plan_of(changed(path, without="shared_head_norm"))
    assert shared is not None
    vocabulary = len(tiny_vocabulary().tokens)
    matrix = "F32", np.zeros((vocabulary, 64), np.float32)
    own = head_plan_of(changed(path, nextn__embed_tokens__weight=matrix, nextn__shared_head_head__weight=matrix))
    assert own is not None
    names = [[matrix.name for matrix in plan.matrices] for plan in (shared, own)]
    assert [found[0] for found in names] == ["token_embd.weight", "blk.3.nextn.embed_tokens.weight"]
    assert "blk.3.nextn.shared_head_head.weight" in names[1]
    assert "blk.3.nextn.shared_head_head.weight" not in names[0]


def test_only_the_first_tokens_are_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokens = tiny_architecture(tmp_path, DENSE), np.arange(3, 3 + TOKENS, dtype=np.int32)
    whole = head_plan_of(path)
    monkeypatch.setattr(draft_head, "DRAFTED_TOKENS", 100)
    trimmed = head_plan_of(path)
    assert whole is not None
    assert trimmed is not None
    given = given_states(64)
    expected = reference.exact(whole, tokens, given=given)[:, :100]
    np.testing.assert_array_equal(reference.exact(trimmed, tokens, given=given), expected)
    assert [one.name for one in trimmed.matrices] == [one.name for one in whole.matrices]


@pytest.mark.parametrize("without", ["nextn", "blk.3."])
def test_files_may_lack_the_head(tmp_path: Path, without: str) -> None:
    assert head_plan_of(changed(tiny_architecture(tmp_path, DENSE), without=without)) is None


def test_several_heads_are_not_used(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["qwen35.nextn_predict_layers"] = 2

    assert head_plan_of(changed_copy(tiny_architecture(tmp_path, DENSE), tmp_path / "two.gguf", change)) is None


def test_other_models_have_no_head(tmp_path: Path) -> None:
    assert head_plan_of(tiny_architecture(tmp_path, "qwen3")) is None


@pytest.mark.parametrize(
    ("without", "tensors", "error", "words"),
    [
        ("hnorm", {}, BadGGUF, "tensor missing: .*nextn.hnorm"),
        ("enorm", {}, BadGGUF, "tensor missing: .*nextn.enorm"),
        ("blk.3.attn_k.", {}, BadGGUF, "tensor missing: .*attn_k"),
        ("eh_proj", {"nextn__eh_proj__weight": ("F32", np.zeros((64, 64)))}, BadGGUF, "must be 128 x 64"),
        ("", {"attn_sinks__weight": ("F32", np.zeros(4))}, UnsupportedModel, "blk.3.attn_sinks.weight"),
    ],
)
def test_broken_heads_are_refused(
    tmp_path: Path, without: str, tensors: dict[str, Tensor], error: type[ModelFileError], words: str
) -> None:
    path = changed(tiny_architecture(tmp_path, DENSE), without=without, **tensors)
    with pytest.raises(error, match=words) as refused:
        head_plan_of(path)
    assert "--speculate off" in refused.value.hint
    with open_gguf(path) as file:
        plan_of_header(file)  # which leaves the layer out


@pytest.mark.push
@pytest.mark.parametrize("name", HEADS)
def test_broken_metadata_ends_in_a_plan_or_in_words(tmp_path: Path, name: str) -> None:
    whole, refused = draft_of(written(tmp_path, name)), 0
    for case in range(100):
        random, broken = Random(case), whole.copy()
        for _ in range(random.choice((1, 2, 3))):
            random.choice(random.choice((OF_METADATA, OF_TENSORS)))(random, broken)
        try:
            draft_plan_of_header(read_gguf(broken.build(), Path("broken.gguf")))
        except ModelFileError:
            refused += 1
    assert refused > 15
    assert draft_plan_of_header(read_gguf(whole.build(), Path("whole.gguf"))) is not None
