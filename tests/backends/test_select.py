"""From a path to an open backend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends import llama_probe
from llmrun.backends.base import DEFAULT_CONTEXT, Backend
from llmrun.backends.cpu import CpuBackend
from llmrun.backends.llama_cpp import LlamaBackend
from llmrun.backends.llama_probe import Gpus
from llmrun.backends.scripted import ScriptedBackend
from llmrun.backends.select import open_backend
from llmrun.errors import BadGGUF, ModelNotFound, UnsupportedModel, UsageError
from tests.support.gguf_files import tiny_llama, tiny_vocabulary, write_gguf
from tests.support.tiny_models import changed_copy

NO_GPU = Gpus((), "no GPU here")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_probe, "gpus", lambda: NO_GPU)


def opened(path: Path, **options: Any) -> tuple[type[Backend], list[str]]:
    """Which backend opened a file, and the reasons that were given."""
    reasons: list[str] = []
    backend = open_backend(path, threads=1, explain=reasons.append, **options)
    backend.close()
    return type(backend), reasons


def test_a_backend_that_was_named_is_taken_without_a_word(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    assert opened(path, backend="cpu") == (CpuBackend, [])
    assert opened(path, backend="llama") == (LlamaBackend, [])


def test_auto_is_the_cpu_engine_where_there_is_no_gpu(tmp_path: Path) -> None:
    assert opened(tiny_llama(tmp_path / "tiny.gguf")) == (CpuBackend, ["auto took cpu: no GPU here"])


def test_auto_is_llama_where_it_has_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_probe, "gpus", lambda: Gpus(("NVIDIA H200",)))
    path = tiny_llama(tmp_path / "tiny.gguf")
    assert opened(path) == (LlamaBackend, ["auto took llama: it can use NVIDIA H200"])
    assert opened(path, gpu_layers=0) == (CpuBackend, ["auto took cpu: no layer is to run on a GPU"])


def test_auto_is_llama_for_what_the_cpu_engine_does_not_run(tmp_path: Path) -> None:
    """A llama under the name of an architecture that is computed alike, but that we do not know."""
    path = changed_copy(tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "other.gguf", as_mistral)
    backend, [reason] = opened(path)
    assert backend is LlamaBackend
    assert "architecture not supported" in reason


def as_mistral(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["general.architecture"] = "mistral3"
    for key in [key for key in metadata if key.startswith("llama.")]:
        metadata["mistral3." + key.removeprefix("llama.")] = metadata.pop(key)


def test_without_the_extra_the_command_that_installs_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_probe, "is_installed", lambda: False)
    path = tiny_llama(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=r"llama\.cpp is not installed: --backend llama") as error:
        open_backend(path, backend="llama")
    assert error.value.hint.startswith(f"install it: {sys.executable} -m pip install ")
    other = changed_copy(path, tmp_path / "other.gguf", as_mistral)
    with pytest.raises(UnsupportedModel, match="mistral3") as refusal:
        open_backend(other)
    assert f"{sys.executable} -m pip install " in refusal.value.hint


@pytest.mark.parametrize(
    ("train", "asked", "expected"), [(512, None, 512), (1 << 20, None, DEFAULT_CONTEXT), (512, 99, 99)]
)
def test_the_context_is_the_models_own_up_to_a_limit(
    tmp_path: Path, train: int, asked: int | None, expected: int
) -> None:
    backend = open_backend(tiny_llama(tmp_path / "tiny.gguf", context=train), context_size=asked, threads=1)
    backend.close()
    assert backend.info.context_size == expected
    assert backend.info.train_context == train


def test_the_scripted_backend_needs_no_model(tmp_path: Path) -> None:
    assert isinstance(open_backend(tmp_path / "none.gguf", backend="scripted"), ScriptedBackend)


def test_an_unknown_backend_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown backend: --backend: 'abacus', known are auto, cpu, llama"):
        open_backend(tmp_path / "none.gguf", backend="abacus")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        open_backend(tmp_path / "none.gguf")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    with pytest.raises(BadGGUF):
        open_backend(path)


def test_an_unsupported_architecture_says_which_ones_are(tmp_path: Path) -> None:
    metadata = {"general.architecture": "mamba", **tiny_vocabulary().metadata()}
    path = write_gguf(tmp_path / "mamba.gguf", metadata, {})
    with pytest.raises(UnsupportedModel, match="'mamba', the CPU engine runs llama") as error:
        open_backend(path, backend="cpu")
    assert error.value.exit_code == 3
    assert error.value.hint
