"""How far each layer of a model looks back, by its header, as llama.cpp has it: for architectures that have no plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile

# Of so many layers the last one sees everything, where the file does not say otherwise (llama.cpp's src/models); of 0,
# none does.
_PERIODS = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "lfm2": 0,
    "mellum": 4,
    "olmo2": 4,
    "plamo3": 8,
}
_WINDOWS = {"exaone4": 4096, "gemma2": 4096}  # where the file does not say
_ONLY_WITH_LAYERS = {"exaone4": 64}  # of a family in which one model has windows
_IGNORED = frozenset({"phi3"})  # llama.cpp lets all layers see everything, as some files are wrong


def layer_windows(file: GGUFFile, n_layers: int) -> list[int]:
    """Positions that each layer sees, its own among them; 0: all before it, and where nobody knows. Raises BadGGUF for
    a window that is no number."""
    architecture = file.string("general.architecture")
    key = f"{architecture}.attention.sliding_window"
    pattern = file.metadata.get(f"{key}_pattern", _PERIODS.get(architecture))
    others = _ONLY_WITH_LAYERS.get(architecture, n_layers) != n_layers
    if pattern is None or architecture in _IGNORED or others:
        return [0] * n_layers
    window = file.integer(key, _WINDOWS.get(architecture, 0), minimum=0)
    if isinstance(pattern, np.ndarray):
        return [window if seen else 0 for seen in np.resize(pattern, n_layers).tolist()]
    period = file.integer(f"{key}_pattern", _PERIODS.get(architecture, 0), minimum=0)
    return [window if period == 0 or layer % period < period - 1 else 0 for layer in range(n_layers)]
