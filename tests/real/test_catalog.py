"""Tests that the catalogue describes real models."""

from __future__ import annotations

import pytest

from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.catalog import load_catalog
from tests.support.models.attention_heads import heads_in
from tests.support.models.downloads import CODER, GEMMA, PartedModel, assembled

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("name", "model"), [("qwen2.5-coder:1.5b", CODER), ("gemma3:270m", GEMMA)])
def test_heads_are_those_of_the_model(name: str, model: PartedModel) -> None:
    with open_gguf(assembled(model)) as file:
        assert heads_in(file) == set(load_catalog().entry(name).attention)
