"""Tests of each layer's window size read from the header, as llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.sizing import layer_windows
from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import write_gguf


def windows(tmp_path: Path, architecture: str, n_layers: int = 6, **attention: Any) -> list[int]:
    metadata = {f"{architecture}.attention.{name}": value for name, value in attention.items()}
    tensors = {"token_embd.weight": ("F32", np.zeros((1, 32), np.float32))}
    path = write_gguf(tmp_path / "made.gguf", {"general.architecture": architecture, **metadata}, tensors)
    with open_gguf(path) as file:
        return layer_windows(file, n_layers)


@pytest.mark.parametrize(
    ("architecture", "attention", "expected"),
    [
        ("llama", {}, [0] * 6),
        ("llama", {"sliding_window": 16}, [0] * 6),  # Mistral's first files have a window that no engine uses
        ("phi3", {"sliding_window": 16, "sliding_window_pattern": 2}, [0] * 6),
        ("gemma2", {}, [4096, 0] * 3),
        ("gemma2", {"sliding_window": 16}, [16, 0] * 3),
        ("gemma3", {}, [0] * 6),
        ("gemma3", {"sliding_window": 16}, [16] * 5 + [0]),
        ("gemma3", {"sliding_window": 16, "sliding_window_pattern": 3}, [16, 16, 0] * 2),
        ("cohere2", {"sliding_window": 16, "sliding_window_pattern": 0}, [16] * 6),
        ("gpt-oss", {"sliding_window": 16, "sliding_window_pattern": 1}, [0] * 6),
        ("lfm2", {"sliding_window": 16}, [16] * 6),
        ("lfm2", {}, [0] * 6),
        ("exaone4", {"sliding_window": 16}, [0] * 6),  # only the model with 64 layers has windows
        ("made", {"sliding_window": 16, "sliding_window_pattern": np.array([1, 0, 0, 1, 1, 0])}, [16, 0, 0, 16, 16, 0]),
        ("made", {"sliding_window_pattern": np.array([True, False] * 3)}, [0] * 6),
        ("gemma4", {"sliding_window": 16, "sliding_window_pattern": np.array([True, False] * 3)}, [16, 0] * 3),
    ],
)
def test_windows_by_architecture_and_what_the_file_says(
    tmp_path: Path, architecture: str, attention: dict[str, Any], expected: list[int]
) -> None:
    assert windows(tmp_path, architecture, **attention) == expected


def test_exaone_of_64_layers_has_windows_though_the_file_does_not_say_so(tmp_path: Path) -> None:
    assert windows(tmp_path, "exaone4", 64) == [4096, 4096, 4096, 0] * 16


def test_a_window_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadGGUF, match=r"gemma3\.attention\.sliding_window"):
        windows(tmp_path, "gemma3", sliding_window="far")
