"""Which layers of a model llama.cpp runs, and which of them keep keys and values, by the header alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile

# Layers of gemma3n that keep keys and values; the others look at theirs. The file does not say.
_GEMMA3N_STORING = 20


def layers_of(file: GGUFFile) -> int:
    return file.integer(f"{file.string('general.architecture')}.block_count", minimum=1, maximum=1 << 16)


def layers_run(file: GGUFFile) -> int:
    """All but those at the end that predict tokens further ahead: these are neither loaded nor have a cache."""
    ahead = file.integer(f"{file.string('general.architecture')}.nextn_predict_layers", 0, minimum=0)
    return max(0, layers_of(file) - ahead) or layers_of(file)  # of a file that has no others


def storing_layers(file: GGUFFile) -> int:
    """How many layers, the first ones, keep keys and values. The others look at theirs, or are not run."""
    architecture, run = file.string("general.architecture"), layers_run(file)
    if architecture == "gemma3n":
        return min(run, _GEMMA3N_STORING)
    if architecture != "gemma4":
        return run
    return run - file.integer(f"{architecture}.attention.shared_kv_layers", 0, minimum=0, maximum=run)
