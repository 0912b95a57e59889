"""Tests that the results of tiny models have the digests in numerics.json, at every instruction-set level.

The models cover all architectures, weight types and types of the KV cache. `scripts/numerics` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.compiled.host import IDENTIFY
from llmrun.formats.layouts.records import NUMERICS
from scripts.kernel_list import CACHES, kernels_of, known_shapes
from tests.support.kernels.runs import EXECUTABLE_LEVELS, at_level
from tests.support.models.digests import StableRandom, digest_of_results
from tests.support.models.numeric_models import (
    DIGESTS,
    NUMERIC_MODELS,
    read_digests,
    write_numeric_model,
)

EXPECTED: Mapping[str, Any] = read_digests()
IN_WHEELS = set(kernels_of("portable", known_shapes()))
CHANGED = f"""
The engine no longer computes the bits of numerics version {NUMERICS}. Answers to the same seed change, saved states and
recordings of older versions become useless, and other machines give different answers until they are updated.
If that is not intended, find the change: `llmrun replay` names the first op that differs.
If it is intended, raise NUMERICS in llmrun/formats/layouts/records.py and run scripts/numerics, which writes
{DIGESTS.name} again."""
OTHER_MODEL = f"""
The model itself has changed, not the engine: its file format, its vocabulary or the generator of its weights.
Run scripts/numerics, which writes {DIGESTS.name} again, at a commit whose kernels did not change."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Return a function that writes a model once and returns its path and digest."""
    folder = tmp_path_factory.mktemp("numerics")

    @cache
    def write(name: str) -> tuple[Path, str]:
        path = folder / f"{list(NUMERIC_MODELS).index(name)}.gguf"
        return path, write_numeric_model(path, name)

    return write


def test_the_digests_cover_every_model_and_this_version() -> None:
    assert EXPECTED["numerics"] == NUMERICS, "run scripts/numerics after raising NUMERICS"
    assert list(EXPECTED["models"]) == list(NUMERIC_MODELS), "run scripts/numerics after adding or removing models"


@pytest.mark.cover(1)
@pytest.mark.push
@pytest.mark.parametrize("name", NUMERIC_MODELS)
@pytest.mark.parametrize("level", EXECUTABLE_LEVELS)
def test_results_have_the_recorded_digests(level: str, name: str, written: Callable[[str], tuple[Path, str]]) -> None:
    path, digest = written(name)
    assert digest == EXPECTED["models"][name]["file"], OTHER_MODEL
    with at_level(level) as loaded:
        found = digest_of_results(path, NUMERIC_MODELS[name].kv_type)
    assert found == EXPECTED["models"][name]["logits"], CHANGED
    if NUMERIC_MODELS[name].kv_type in CACHES:
        assert loaded - {IDENTIFY} <= IN_WHEELS, (
            "scripts/kernel_list.py lacks kernels, so wheels would not contain them"
        )


def test_random_numbers_are_splitmix64() -> None:
    """The first outputs for seed 0, from the reference implementation (Vigna, prng.di.unimi.it/splitmix64.c)."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert StableRandom(0).bits(3).tolist() == expected
    assert json.dumps(StableRandom(0).uniform(0, 1, 1).tolist()) == "[0.8833108082136426]"
