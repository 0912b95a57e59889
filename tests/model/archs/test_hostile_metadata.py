"""Tests of every architecture with metadata and tensors broken in every way: the result is a plan or our own error."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF, ModelFileError, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import plan_of_header
from tests.soak.model_mutations import OF_METADATA, OF_TENSORS
from tests.support.gguf.gguf_files import Tensor
from tests.support.gguf.gguf_memory import read_gguf
from tests.support.models.model_drafts import Draft, draft_of
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from tests.support.models.tiny_encoders import TINY_ENCODERS, tiny_encoder
from tests.support.models.tiny_models import changed_copy

CASES = [range(10), pytest.param(range(10, 60), marks=pytest.mark.night)]


@functools.cache
def draft(name: str) -> Draft:
    with tempfile.TemporaryDirectory() as folder:
        if name in TINY_ENCODERS:
            return draft_of(tiny_encoder(Path(folder), TINY_ENCODERS[name]))
        return draft_of(tiny_architecture(Path(folder), name))


# Deep models are left out, so that a case takes only milliseconds.
NAMES = [name for name, row in TINY_ARCHITECTURES.items() if row.layers < 20] + [*TINY_ENCODERS]


@pytest.mark.cover(1)
@pytest.mark.push
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cases", CASES, ids=["some", "more"])
def test_broken_metadata_ends_in_a_plan_or_in_words(cases: range, name: str) -> None:
    refused = 0
    for case in cases:
        random, changed = Random(case), draft(name).copy()
        for _ in range(random.choice((1, 2, 3))):
            random.choice(random.choice((OF_METADATA, OF_TENSORS)))(random, changed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                plan_of_header(read_gguf(changed.build(), Path("broken.gguf")))
            except ModelFileError:
                refused += 1
    assert refused > len(cases) // 4
    plan_of_header(read_gguf(draft(name).build(), Path("whole.gguf")))


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("qwen3", "attention.head_count", 65, "not 65"),
        ("gemma2", "attn_logit_softcapping", np.float64(1e300), r"not 1e\+300"),
        ("mistral3", "rope.scaling.yarn_beta_fast", np.float64(1e308), r"must be at most 1e\+30, not 1e\+308"),
        ("mistral3", "rope.scaling.yarn_beta_slow", np.float64(5e-324), "must be at least 1e-30, not"),
        ("mistral3", "attention.temperature_scale", np.float64(1e20), r"must be -1e\+09 to 1e\+09, not 1e\+20"),
        ("mistral3", "rope.dimension_count", 8, "must be 16, the head size, not 8"),
        ("qwen3", "feed_forward_length", np.full(5000, 96, np.int32), "not 5000"),
        ("gemma3", "rope.dimension_count_swa", 8, "differs from the value of layers without a window"),
    ],
)
def test_what_broke_a_reader_once(tmp_path: Path, name: str, key: str, value: object, words: str) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata[f"{name}.{key}"] = value

    path = changed_copy(tiny_architecture(tmp_path, name), tmp_path / "changed.gguf", change)
    with open_gguf(path) as file, pytest.raises((BadGGUF, UnsupportedModel), match=words):
        plan_of_header(file)
