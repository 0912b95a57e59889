"""Which sampling parameters hold when the user gives none: the model's own, then the catalogue's, then llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmrun.engine.requests import check_sampling
from llmrun.errors import BadGGUF, UsageError
from llmrun.sampling_params import SamplingParams

# The keys of gguf-py's constants.py that mean something to our samplers.
_METADATA_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repeat_penalty",
    "general.sampling.penalty_last_n": "penalty_last_n",
}


def default_sampling(metadata: Mapping[str, Any], catalogue: Mapping[str, float] | None = None) -> SamplingParams:
    """The parameters to start from.

    metadata   of the GGUF file: its `general.sampling.*` numbers win
    catalogue  field name of SamplingParams -> number, from models.toml

    The seed is left at 0. Raises BadGGUF when a `general.sampling.*` value is not a number, or one that no sampler
    takes.
    """
    chosen: dict[str, Any] = dict(catalogue or {})
    for key, name in _METADATA_KEYS.items():
        if key not in metadata:
            continue
        value = metadata[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadGGUF(f"sampling default is not a number: {key}: {value!r:.40}")
        try:
            chosen[name] = int(value) if name in ("top_k", "penalty_last_n") else float(value)
            check_sampling(replace(SamplingParams(), **{name: chosen[name]}))
        except (UsageError, ValueError, OverflowError) as error:
            raise BadGGUF(f"sampling default cannot be meant: {key}: {value}") from error
    return replace(SamplingParams(), **chosen)
