"""Which layers of a model llama.cpp runs, and what it keeps of them, by the header alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile


def layers_of(file: GGUFFile) -> int:
    return file.integer(f"{file.string('general.architecture')}.block_count", minimum=1, maximum=1 << 16)


def layers_run(file: GGUFFile) -> int:
    """All but those at the end that predict tokens further ahead: these are neither loaded nor have a cache."""
    ahead = file.integer(f"{file.string('general.architecture')}.nextn_predict_layers", 0, minimum=0)
    return max(0, layers_of(file) - ahead) or layers_of(file)  # of a file that has no others


def keeps_values(file: GGUFFile) -> bool:
    """Not where values are part of keys: of latent attention, whose heads' own sizes have keys of their own."""
    architecture = file.string("general.architecture")
    return file.integer(f"{architecture}.attention.value_length_mla", 0) == 0
