"""Metadata of every architecture, broken in every way a number or a tensor can be: a plan, or an error of ours."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from random import Random

import pytest

from llmrun.archs.registry import plan_of_header
from llmrun.errors import ModelFileError
from llmrun.gguf.reader import read_gguf
from tests.support.model_drafts import Draft, draft_of
from tests.support.model_mutations import OF_METADATA, OF_TENSORS
from tests.support.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture

CASES = 60


@functools.cache
def draft(name: str) -> Draft:
    with tempfile.TemporaryDirectory() as folder:
        return draft_of(tiny_architecture(Path(folder), name))


# As small as the rest: a case takes some milliseconds.
NAMES = [name for name, row in TINY_ARCHITECTURES.items() if row.layers < 40]


@pytest.mark.parametrize("name", NAMES)
def test_broken_metadata_ends_in_a_plan_or_in_words(name: str) -> None:
    refused = 0
    for case in range(CASES):
        random, changed = Random(case), draft(name).copy()
        for _ in range(random.choice((1, 2, 3))):
            random.choice(random.choice((OF_METADATA, OF_TENSORS)))(random, changed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                plan_of_header(read_gguf(changed.build(), Path("broken.gguf")))
            except ModelFileError:
                refused += 1
    assert refused > CASES // 4
    plan_of_header(read_gguf(draft(name).build(), Path("whole.gguf")))
