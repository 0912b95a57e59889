"""Tests that Arm's kernels compute the logits whose digests are in numerics.json. `scripts/test_arm` runs them."""

from __future__ import annotations

import json

import pytest

from llmrun.base.compiled import loading
from tests.support.arm.machines import PROCESSORS, run_on
from tests.support.models.digests import opened
from tests.support.models.numeric_models import NUMERIC_MODELS, read_digests, write_numeric_model

pytestmark = pytest.mark.arm


@pytest.fixture(scope="module")
def models_and_kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the input of digests.py. Models are opened here first, to find out which kernels they need."""
    folder = tmp_path_factory.mktemp("models")
    models = {}
    for number, (name, model) in enumerate(NUMERIC_MODELS.items()):
        path = folder / f"{number}.gguf"
        write_numeric_model(path, name)
        models[name] = (str(path), model.kv_type)
        with opened(path, model.kv_type, 1):
            pass
    names = dict.fromkeys(name for name, _ in loading._loaded)
    kernels = [(name.module, name.function, dict(name.parameters)) for name in names]
    return json.dumps({"models": models, "kernels": kernels})


@pytest.mark.parametrize("machine", PROCESSORS)
def test_arm_computes_the_same_bits(models_and_kernels: str, machine: str) -> None:
    level = PROCESSORS[machine].level
    done = run_on(machine, "-m", "tests.support.arm.digests", text=models_and_kernels, LLMRUN_CPU_LEVEL=level)
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found == {name: digests["logits"] for name, digests in read_digests()["models"].items()}
