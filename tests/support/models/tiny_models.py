"""Tiny llama models that cover everything an engine could get wrong: one row each, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from tests.support.gguf.gguf_files import Tensor, tiny_llama, write_gguf

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]

# Arguments of tiny_llama. The rows cover every weight type, tied and untied output, grouped-query attention, both rope
# scalings, heads whose sizes do not add up to the width, and widths and rows that are not multiples of a vector.
# Attention is compiled for each head and group size, which takes four seconds, so these reuse the sizes of the
# attention tests (compiled.py) and of the architectures' tiny models.
TINY_MODELS: dict[str, dict[str, Any]] = {
    "F32": {"weight_type": "F32"},
    "F32 odd": {"weight_type": "F32", "width": 72, "heads": 11, "kv_heads": 1, "head_size": 16, "feed_forward": 101},
    "F32 untied llama3 rope": {"weight_type": "F32", "tied": False, "rope_scaling": "llama3", "rope_base": 500_000.0},
    "F16 linear rope": {"weight_type": "F16", "rope_scaling": "linear"},
    "BF16 untied many heads": {"weight_type": "BF16", "tied": False, "width": 128, "heads": 8, "kv_heads": 8},
    "Q8_0 one KV head": {"weight_type": "Q8_0", "heads": 4, "kv_heads": 1},
    "Q8_0 large heads": {"weight_type": "Q8_0", "width": 96, "heads": 3, "kv_heads": 1, "head_size": 64},
    "Q4_0 untied": {"weight_type": "Q4_0", "tied": False, "layers": 3},
    "Q4_0 small heads": {"weight_type": "Q4_0", "width": 128, "heads": 4, "kv_heads": 2, "head_size": 16},
    "Q4_1 llama3 rope": {"weight_type": "Q4_1", "rope_scaling": "llama3"},
}


def tiny_model(folder: Path, name: str) -> Path:
    """Write the named model and return its path."""
    return tiny_llama(folder / f"{name.replace(' ', '-')}.gguf", **TINY_MODELS[name])


def changed_copy(source: Path, target: Path, change: Change) -> Path:
    """Write a copy of `source` after `change` has modified its metadata and tensors. Returns `target`."""
    with open_gguf(source) as file:
        plain = str | bool | int | float | np.ndarray
        metadata = {key: value if isinstance(value, plain) else list(value) for key, value in file.metadata.items()}
        tensors: dict[str, Tensor] = {
            name: (tensor.type.name, bytes(file.read(tensor)), tensor.shape[::-1])
            for name, tensor in file.tensors.items()
        }
        change(metadata, tensors)
    return write_gguf(target, metadata, tensors)


def dequantized_copy(source: Path, target: Path) -> Path:
    """Write a copy of `source` with all weights dequantized to float32. Returns `target`."""

    def values_of(file: GGUFFile, name: str) -> Tensor:
        tensor = file.tensors[name]
        assert tensor.type.dequantize is not None
        values = tensor.type.dequantize(file.read(tensor).reshape(tensor.n_rows, -1))
        return ("F32", values.reshape(tensor.shape[::-1]))

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        with open_gguf(source) as file:
            tensors |= {name: values_of(file, name) for name in tensors}

    return changed_copy(source, target, change)
