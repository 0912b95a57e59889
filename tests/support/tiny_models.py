"""Tiny llama models that differ in everything an engine could get wrong: one row each, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.gguf_files import tiny_llama

# Arguments of tiny_llama. Every weight type; tied and untied output; grouped-query attention; both rope scalings;
# heads whose sizes do not add up to the width; widths and rows that are no whole number of vectors.
TINY_MODELS: dict[str, dict[str, Any]] = {
    "F32": {"weight_type": "F32"},
    "F32 odd": {"weight_type": "F32", "width": 72, "heads": 3, "kv_heads": 1, "head_size": 16, "feed_forward": 101},
    "F32 untied llama3 rope": {"weight_type": "F32", "tied": False, "rope_scaling": "llama3", "rope_base": 500_000.0},
    "F16 linear rope": {"weight_type": "F16", "rope_scaling": "linear"},
    "BF16 untied many heads": {"weight_type": "BF16", "tied": False, "width": 128, "heads": 8, "kv_heads": 8},
    "Q8_0 one KV head": {"weight_type": "Q8_0", "heads": 4, "kv_heads": 1},
    "Q8_0 large heads": {"weight_type": "Q8_0", "width": 96, "heads": 2, "kv_heads": 1, "head_size": 64},
    "Q4_0 untied": {"weight_type": "Q4_0", "tied": False, "layers": 3},
    "Q4_0 small heads": {"weight_type": "Q4_0", "width": 128, "heads": 4, "kv_heads": 2, "head_size": 16},
    "Q4_1 llama3 rope": {"weight_type": "Q4_1", "rope_scaling": "llama3"},
}


def tiny_model(folder: Path, name: str) -> Path:
    """Write the model of that name; its path."""
    return tiny_llama(folder / f"{name.replace(' ', '-')}.gguf", **TINY_MODELS[name])
