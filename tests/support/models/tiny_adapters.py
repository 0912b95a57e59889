"""Random LoRA adapters for tiny models, and llama.cpp with adapters as their oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from llmrun.backends.llama.lora import is_applied
from llmrun.formats.gguf.adapter import EMBEDDING
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.gguf.tensors import trimmed
from llmrun.model.plan.adapting import changeable
from tests.support.gguf.gguf_files import Tensor, write_gguf
from tests.support.models.fidelity import plan_of
from tests.support.models.llama_cpp_oracle import LlamaCppModel


def changed_tensors(model: Path) -> set[str]:
    """Return the tensors that both the CPU engine and llama.cpp can adapt."""
    names = changeable(plan_of(model))
    with open_gguf(model) as file:
        if "output.weight" not in file.tensors:
            names.discard(EMBEDDING)
        return {name for name in names if is_applied(name, file) and len(trimmed(file.tensors[name].shape)) == 2}


def tiny_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 4.0,
    seed: int = 1,
    weight_type: str = "F32",
    names: Collection[str] | None = None,
    experts: Collection[str] = (),
    **metadata: Any,
) -> Path:
    """Write an adapter that changes a model's results about as much as its own weights do, and return its path.

    `names` are the tensors that it changes; by default, all that both backends can adapt. `experts` are tensors with
    matrices for each expert.
    `metadata` overrides keys, with "__" for dots. None removes a key.
    """
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}

    def random_matrix(rows: int, columns: int) -> Tensor:
        return weight_type, random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    with open_gguf(model) as file:
        for name in sorted(changed_tensors(model) if names is None else names):
            columns, rows = file.tensors[name].shape[:2]
            tensors[f"{name}.lora_a"] = random_matrix(*((rows, rank) if name == EMBEDDING else (rank, columns)))
            tensors[f"{name}.lora_b"] = random_matrix(columns if name == EMBEDDING else rows, rank)
        for name in experts:
            columns, rows, n = file.tensors[name].shape
            for part, shape in (("a", (n, rank, columns)), ("b", (n, rows, rank))):
                values = random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
                tensors[f"{name}.lora_{part}"] = weight_type, values
        keys: dict[str, Any] = {
            "general.type": "adapter",
            "general.architecture": file.string("general.architecture"),
            "adapter.type": "lora",
            "adapter.lora.alpha": alpha,
        }
    changed = {name.replace("__", "."): value for name, value in metadata.items()}
    return write_gguf(path, {key: value for key, value in (keys | changed).items() if value is not None}, tensors)


class AdaptedOracle(LlamaCppModel):
    """llama.cpp with adapters, which apply to all positions. By default, it has the most accurate settings."""

    def __init__(self, path: Path, adapters: Sequence[tuple[Path, float]], kv_type: str = "f32") -> None:
        super().__init__(path, kv_type=kv_type, flash_attention=False)
        loaded = [llama_cpp.llama_adapter_lora_init(self._model, str(path).encode()) for path, _ in adapters]
        if not all(loaded):
            raise RuntimeError(f"llama.cpp does not load {adapters}")
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(loaded))(*loaded)
        scales = (ctypes.c_float * len(loaded))(*[scale for _, scale in adapters])
        for context in self._contexts:
            if llama_cpp.llama_set_adapters_lora(context, pointers, len(loaded), scales) != 0:
                raise RuntimeError("llama.cpp does not use the adapters")


def scales_of(n: int, *scales: float) -> NDArray[np.float32]:
    """Return the scales of n rows that all use the same adapters, float32[n, adapters]."""
    return np.tile(np.array(scales, np.float32), (n, 1))
