"""Tests that ARM's kernels compute the logits whose digests are in numerics.json. `scripts/test_arm` runs them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from llmrun.compiled import store
from llmrun.compiled.store import object_images
from tests.support.kernels.runs import PLAIN_TARGETS
from tests.support.models.numeric_models import NUMERIC_MODELS, opened, read_digests, write_numeric_model

ROOT = Path(__file__).resolve().parents[3]
ARM = ROOT / ".venv-arm"

pytestmark = pytest.mark.arm


def test_arm_computes_the_same_bits(tmp_path: Path) -> None:
    """Models are opened here first, to find out which kernels they need."""
    models = {
        name: (str(tmp_path / f"{number}.gguf"), model.kv_type)
        for number, (name, model) in enumerate(NUMERIC_MODELS.items())
    }
    for name, (path, kv_type) in models.items():
        write_numeric_model(Path(path), name)
        with opened(Path(path), kv_type, 1):
            pass
    target = PLAIN_TARGETS["neondot"]
    names = list({name for name, _ in store._loaded})
    object_images(names, target)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({repr(name): store._key(name, target) for name in names}), encoding="utf-8")
    done = subprocess.run(
        [
            *("qemu-aarch64-static", "-L", str(ARM / "root"), str(ARM / "root" / "usr" / "bin" / "python3.11")),
            *("-m", "tests.support.kernels.arm_digests", str(keys)),
        ],
        input=json.dumps(models),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ARM / 'libraries'}", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found == {name: digests["logits"] for name, digests in read_digests()["models"].items()}
