"""From a path to an open backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.base import DEFAULT_CONTEXT
from llmrun.backends.cpu import CpuBackend
from llmrun.backends.scripted import ScriptedBackend
from llmrun.backends.select import open_backend
from llmrun.errors import BadGGUF, ModelNotFound, UnsupportedModel, UsageError
from tests.support.gguf_files import tiny_llama, tiny_vocabulary, write_gguf


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_auto_is_the_cpu_engine(tmp_path: Path, name: str) -> None:
    backend = open_backend(tiny_llama(tmp_path / "tiny.gguf"), backend=name, threads=1)
    backend.close()
    assert isinstance(backend, CpuBackend)
    assert backend.info.threads == 1


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
    with pytest.raises(UsageError, match="unknown backend: --backend: 'abacus', known are auto, cpu"):
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
        open_backend(path)
    assert error.value.exit_code == 3
    assert error.value.hint
