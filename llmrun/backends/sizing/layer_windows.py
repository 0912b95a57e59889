"""Reads the sliding window of each layer from the header, for architectures that our own engine does not support."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

# The default period of the window pattern, from llama.cpp's src/models. The last layer of each period attends to all
# tokens, and the other layers have a sliding window. If the period is 0, all layers have one.
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
    "smallthinker": 4,
}
_FIRST_WITHOUT = frozenset({"smallthinker"})  # the first layer of each period attends to all tokens, not the last
_WINDOWS = {"exaone4": 4096, "gemma2": 4096}  # default window sizes in tokens
_ONLY_WITH_LAYERS = {"exaone4": 64}  # In these families, only models with this number of layers have sliding windows.
_IGNORED = frozenset({"phi3"})  # llama.cpp ignores the windows of these architectures because some files are wrong.


def layer_windows(file: GGUFFile, n_layers: int) -> list[int]:
    """Return each layer's window in tokens, including the current token, or 0 if none is known.

    Raises BadGGUF if the window in the metadata is not a valid number.
    """
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
    without = 0 if architecture in _FIRST_WITHOUT else period - 1
    return [window if period == 0 or layer % period != without else 0 for layer in range(n_layers)]
