"""Tests of the backend registry: one line per backend, and everything that follows from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import (
    BACKENDS,
    CHOICES,
    HIDDEN_CHOICES,
    STAND_INS,
    Entry,
    backend_named,
    choices_in_words,
    is_stand_in,
    stand_in_named,
)
from llmrun.backends.select import open_backend
from llmrun.backends.sizing import Footprint
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import tiny_llama

HEAVY = {"llama_cpp", "llvmlite", "numba", "numpy", "regex"}
each_backend = pytest.mark.parametrize("entry", BACKENDS, ids=[entry.name for entry in BACKENDS])


@pytest.mark.push
@pytest.mark.parametrize("entry", [*BACKENDS, *STAND_INS], ids=lambda entry: entry.name)
def test_a_model_says_the_name_of_its_backend(tmp_path: Path, entry: Entry) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    opened = open_backend(path, OpenOptions(entry.name, context_size=64, threads=1, gpu_layers=0))
    opened.close()
    assert opened.info.backend == entry.name


@pytest.mark.push
@each_backend
def test_a_footprint_comes_from_the_header_and_counts_the_cache(tmp_path: Path, entry: Entry) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    options = OpenOptions(entry.name, context_size=256, max_sequences=2, threads=1, gpu_layers=0)
    with open_gguf(path) as file:
        footprint = entry.kind().footprint(file, options)
        opened = entry.kind().open(file, options)
    opened.close()
    assert isinstance(footprint, Footprint)
    assert footprint.weights > 0
    assert footprint.cache.of(256) == opened.info.kv_bytes


@each_backend
def test_probing_a_backend_imports_nothing_heavy(entry: Entry) -> None:
    code = (
        "import sys\nfrom llmrun.backends.registry import backend_named\n"
        f"kind = backend_named({entry.name!r}).kind()\nkind.probe()\nkind.gpus\nprint(' '.join(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(ran.stdout.split())


def test_the_names_are_told_in_order() -> None:
    assert CHOICES == ("auto", "cpu", "llama")
    assert choices_in_words() == "auto, cpu, or llama (llama.cpp)"


def test_stand_ins_are_accepted_but_not_told() -> None:
    assert HIDDEN_CHOICES == ("scripted",)
    assert is_stand_in("scripted")
    assert not is_stand_in("cpu")
    assert stand_in_named("cpu") is None
    assert backend_named("scripted") is None
