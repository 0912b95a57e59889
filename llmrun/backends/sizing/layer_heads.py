"""The sizes of heads in each layer, by the header, as llama.cpp keeps them: for architectures that have no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile


def head_sizes(file: GGUFFile, windows: Sequence[int], default: int) -> list[tuple[int, int]]:
    """(features of a key, of a value) that are kept of the heads of each layer: those that have a window may have
    others. `default` where the file says nothing.

    Of latent attention, whose heads' own sizes have keys of their own, values are part of keys: none are kept.
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
