"""Reads the head sizes of each layer from the header, for architectures that our own engine does not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile


def head_sizes(file: GGUFFile, windows: Sequence[int], default: int) -> list[tuple[int, int]]:
    """Return the key and value sizes of one head in each layer, in features, as llama.cpp caches them.

    Sliding-window layers may have sizes that differ from those of the other layers. If the file does not specify a
    size, the result is `default`. With latent attention (MLA), values are part of the cached keys, so their size is 0.
    """
    attention = f"{file.string('general.architecture')}.attention"
    if file.integer(f"{attention}.value_length_mla", 0):
        return [(file.integer(f"{attention}.key_length", default, minimum=0), 0)] * len(windows)
    plain = _sizes(file, attention, "", (default, default))
    of_window = _sizes(file, attention, "_swa", plain)
    return [of_window if window else plain for window in windows]


def _sizes(file: GGUFFile, attention: str, kind: str, default: tuple[int, int]) -> tuple[int, int]:
    key = file.integer(f"{attention}.key_length{kind}", default[0], minimum=0)
    return key, file.integer(f"{attention}.value_length{kind}", default[1], minimum=0)
