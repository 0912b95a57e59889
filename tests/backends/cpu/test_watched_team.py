"""Tests of the digests of ops: they depend on neither threads nor levels, and identify the op that differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernels.runs import LEVELS_HERE, at_level
from tests.support.models.digests import opened
from tests.support.models.numeric_models import write_numeric_model

pytestmark = pytest.mark.push

TOKENS = [5, 6, 7, 8, 9]


def digests_of(path: Path, threads: int, tokens: list[int] = TOKENS) -> list[tuple[str, str]]:
    with opened(path, "f16", threads) as backend:
        return backend.op_digests(tokens)


@pytest.mark.night
@pytest.mark.parametrize("name", ["qwen2", "llama Mixtral", "gemma4 E2B", "deepseek2", "qwen35moe", "q4_k weights"])
def test_threads_and_levels_change_no_digest(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_numeric_model(path, name)
    expected = digests_of(path, 1)
    assert digests_of(path, 3) == expected
    assert digests_of(path, 1, [5]) == digests_of(path, 3, [5])  # each thread has its own copy of a single row
    with at_level(LEVELS_HERE[-1]):
        assert digests_of(path, 2) == expected


def test_every_op_has_a_name_and_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_numeric_model(path, "qwen2")
    with opened(path, "f16", 2) as backend:
        digests = backend.op_digests(TOKENS)
        assert backend.kv.lengths[0] == 0
        assert len(digests) == len(backend.plan.ops) + 1
    names = [name for name, _ in digests]
    assert names[:3] == ["embed token_embd", "rmsnorm after token_embd", "linear blk.0.attn_q"]
    assert names[-1] == "logits"


def test_a_changed_weight_changes_its_op_first(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_numeric_model(path, "qwen2")
    expected = digests_of(path, 2)
    with opened(path, "f16", 2) as backend:
        matrix = next(matrix for matrix in backend.plan.matrices if matrix.name == "blk.1.ffn_up.weight")
        packed = next(kept for kept in backend.lowered.keep if isinstance(kept, dict))[matrix.name]
        packed.data[0, 42] ^= 64  # in the mantissa
        changed = backend.op_digests(TOKENS)
    first = next(new for new, old in zip(changed, expected, strict=True) if new != old)
    assert first[0] == "linear blk.1.ffn_up"
