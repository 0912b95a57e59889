"""Reads from the header how many layers llama.cpp runs, and how many of them store keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile


def layers_of(file: GGUFFile) -> int:
    return file.integer(f"{file.string('general.architecture')}.block_count", minimum=1, maximum=1 << 16)


def layers_run(file: GGUFFile) -> int:
    """Return the number of layers that llama.cpp runs.

    llama.cpp skips the layers for multi-token prediction at the end. They are not loaded and have no cache.
    """
    ahead = file.integer(f"{file.string('general.architecture')}.nextn_predict_layers", 0, minimum=0)
    return max(0, layers_of(file) - ahead) or layers_of(file)  # all, if the file has only such layers


def storing_layers(file: GGUFFile) -> int:
    """Return how many layers store keys and values. Later layers reuse their cache or are not run."""
    architecture, run = file.string("general.architecture"), layers_run(file)
    if architecture == "gemma3n":  # its files do not contain this number
        from llmrun.model.archs.gemma3n import STORING

        return min(run, STORING)
    if architecture != "gemma4":
        return run
    return run - file.integer(f"{architecture}.attention.shared_kv_layers", 0, minimum=0, maximum=run)
