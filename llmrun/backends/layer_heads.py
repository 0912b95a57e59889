"""What layers keep of a position, by the header, as llama.cpp has it: for architectures that have no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile

# Layers of gemma3n that keep keys and values; the others look at theirs. The file does not say.
_GEMMA3N_STORING = 20


def head_sizes(file: GGUFFile, windows: Sequence[int], default: int) -> list[tuple[int, int]]:
    """(features of a key, of a value) of the heads of each layer: those that have a window may have others. `default`
    where the file says nothing."""
    plain = _sizes(file, "", (default, default))
    of_window = _sizes(file, "_swa", plain)
    return [of_window if window else plain for window in windows]


def _sizes(file: GGUFFile, kind: str, default: tuple[int, int]) -> tuple[int, int]:
    attention = f"{file.string('general.architecture')}.attention"
    key = file.integer(f"{attention}.key_length{kind}", default[0], minimum=0)
    return key, file.integer(f"{attention}.value_length{kind}", default[1], minimum=0)


def storing_layers(file: GGUFFile, n_layers: int) -> int:
    """How many layers, the first ones, keep keys and values. The others look at theirs."""
    architecture = file.string("general.architecture")
    if architecture == "gemma3n":
        return min(n_layers, _GEMMA3N_STORING)
    if architecture != "gemma4":
        return n_layers
    return n_layers - file.integer(f"{architecture}.attention.shared_kv_layers", 0, minimum=0, maximum=n_layers)
