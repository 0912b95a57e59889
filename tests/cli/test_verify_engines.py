"""Tests of `llmrun verify --engines` as users type it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.backends.fake_llama import without_llama
from tests.support.cli.commands import ROOT, llmrun
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.vision.opened import SMALL
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.push


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a projector in its folder."""
    folder = tmp_path_factory.mktemp("models")
    tiny_projector(folder, "idefics3", "F16", **SMALL["idefics3"]).rename(folder / "mmproj-model.gguf")
    return tiny_text_model(folder, "idefics3").rename(folder / "model.gguf")


def test_agreement_is_one_line(model: Path) -> None:
    done = llmrun("verify", str(model), "--engines")
    assert (done.returncode, done.stderr) == (0, b"")
    whole, engines = done.stdout.decode().splitlines()
    assert whole.startswith(f"{model}: OK: ")
    assert engines.startswith(f"{model}: OK: both engines agree on 4 embeddings of a test picture: smallest cosine ")


def test_json_has_the_numbers(model: Path) -> None:
    body = json.loads(llmrun("verify", str(model), "--engines", "--json").stdout)
    engines = body["models"][0]["engines"]
    assert (engines["agrees"], engines["rows"], engines["tolerance"]) == (True, 4, 0.999)
    assert engines["projector"] == str(model.with_name("mmproj-model.gguf"))
    assert 0.999 < engines["cosine"] <= 1
    assert "engines" not in json.loads(llmrun("verify", str(model), "--json").stdout)["models"][0]


def test_models_without_projector_get_another_command(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model.gguf")
    done = llmrun("verify", str(model), "--engines")
    assert done.returncode == 2
    error, hint = done.stderr.decode().splitlines()
    assert error == f"error: {model}: --engines: no vision projector, so there are no embeddings to compare"
    assert hint.startswith(f"hint: to compare texts: llmrun eval {model} --backend cpu --against-backend llama ")


def test_both_engines_are_needed(model: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(without_llama(tmp_path / "path")), str(ROOT)])}
    done = llmrun("verify", str(model), "--engines", env=env)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: --engines: llama.cpp is not installed\n")
