"""Tests of what drafts and additional rows read, compared with a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.fitting import draft_shares
from tests.support.models.fidelity import head_plan_of, plan_of
from tests.support.models.tiny_architectures import tiny_architecture


def shares(path: Path) -> tuple[float, float]:
    head = head_plan_of(path)
    assert head is not None
    return draft_shares(plan_of(path), head)


def test_rows_of_dense_models_share_all_weights(tmp_path: Path) -> None:
    draft, row = shares(tiny_architecture(tmp_path, "qwen35 layers by name, with a layer ahead"))
    assert 0.3 < draft < 0.7  # one layer of four and eh_proj, and the output matrix that both have
    assert row == pytest.approx(0, abs=0.01)  # only the embedding of the token


def test_rows_have_experts_of_their_own(tmp_path: Path) -> None:
    _, row = shares(tiny_architecture(tmp_path, "qwen35moe fused, with a layer ahead"))
    assert row > 0.05
