"""Checks the keys that belong to an architecture, such as `llama.block_count`.

Each rule is an assertion in llama.cpp's loader or kernels, so a file that breaks a rule makes llama.cpp abort. The
limits also come from llama.cpp (LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS).
"""

from __future__ import annotations

import numpy as np

from llmrun.formats.gguf.metadata import Metadata
from llmrun.formats.gguf.problems import shown

MAX_LAYERS = 512
MAX_EXPERTS = 1024
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

_EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.group_norm_epsilon")
_NO_LANGUAGE_MODEL = "clip"  # the architecture of vision encoders, whose files have none of these keys


def check_hyperparameters(file: Metadata) -> None:
    """Check the architecture's keys that are present. Raises BadGGUF with the name of the key."""
    architecture = file.string("general.architecture", "")
    if architecture == _NO_LANGUAGE_MODEL or not architecture:
        return
    _check_layers(file, architecture)
    _check_experts(file, architecture)
    for name in _EPSILONS:
        epsilon = file.number(f"{architecture}.{name}", 0.0)
        if epsilon < 0:
            raise file.bad(f"{architecture}.{name}", f"must be 0 or more, not {epsilon}")
    scaling = file.string(f"{architecture}.rope.scaling.type", ROPE_SCALINGS[0])
    if scaling not in ROPE_SCALINGS:
        raise file.bad(
            f"{architecture}.rope.scaling.type", f"must be {' or '.join(ROPE_SCALINGS)}, not '{shown(scaling)}'"
        )


def _check_layers(file: Metadata, architecture: str) -> None:
    layers = file.integer(f"{architecture}.block_count", None, minimum=1, maximum=MAX_LAYERS)
    file.integer(f"{architecture}.nextn_predict_layers", 0, minimum=0, maximum=layers)


def _check_experts(file: Metadata, architecture: str) -> None:
    experts = file.integer(f"{architecture}.expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    if architecture.startswith("hunyuan") and experts == 1:
        return  # llama.cpp treats a model with one expert as dense and ignores expert_used_count
    key = f"{architecture}.expert_used_count"
    used = _most(file, key)
    if not (used == 0 if experts == 0 else 0 < used <= experts):
        wanted = f"1 to {experts}" if experts else "0"
        raise file.bad(key, f"must be {wanted}, not {used}, because {architecture}.expert_count is {experts}")
    key = f"{architecture}.expert_group_count"
    groups = file.integer(key, 0, minimum=0, maximum=max(experts - 1, 0))
    if groups > 1:
        if experts % groups:
            raise file.bad(key, f"{experts} experts cannot be divided into {groups} equal groups")
        file.integer(f"{architecture}.expert_group_used_count", 0, minimum=1, maximum=groups - 1)


def _most(file: Metadata, key: str) -> int:
    """Return the value of a key, or the maximum if it has one value per layer. Returns 0 if the key is missing."""
    if isinstance(file.metadata.get(key), np.ndarray):
        return int(file.integers(key).max(initial=0))
    return file.integer(key, 0, minimum=0)
