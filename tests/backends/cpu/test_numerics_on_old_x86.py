"""Tests that x86 processors without AVX-512, and without AVX, compute the digests in numerics.json.

QEMU emulates them; `scripts/test_x86` runs these tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrun.base.compiled import loading
from tests.support.kernels.emulated_x86 import compile_for, run_on, target_on
from tests.support.models.digests import opened
from tests.support.models.numeric_models import NUMERIC_MODELS, read_digests, write_numeric_model

pytestmark = pytest.mark.x86

Models = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Write the models, and open them here, so that `store` knows which kernels they need."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        name: (str(folder / f"{number}.gguf"), model.kv_type)
        for number, (name, model) in enumerate(NUMERIC_MODELS.items())
    }
    for name, (path, kv_type) in found.items():
        write_numeric_model(Path(path), name)
        with opened(Path(path), kv_type, 1):
            pass
    return found


@pytest.mark.parametrize(("processor", "level"), [("Haswell", "avx2"), ("Nehalem", "portable")])
def test_old_processors_compute_the_same_bits(models: Models, processor: str, level: str) -> None:
    target = target_on(processor)
    assert target.level.name == level
    compile_for(target, {name for name, _ in loading._loaded})
    done = run_on(processor, "-W", "error", "-m", "tests.support.models.digests", text=json.dumps(models))
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found == {name: digests["logits"] for name, digests in read_digests()["models"].items()}
