"""Which sampling parameters hold when the user gives none: the model's own, then the catalogue's, then llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrun.errors import BadGGUF
from llmrun.sampling_params import SAMPLING, SamplingParams
from llmrun.settings import RULES


def default_sampling(metadata: Mapping[str, Any], catalogue: Mapping[str, float] | None = None) -> SamplingParams:
    """Choose the parameters to start from.

    metadata   of the GGUF file: its `general.sampling.*` numbers win
    catalogue  field name of SamplingParams -> number, from models.toml

    The seed is left at 0. Raises BadGGUF when a `general.sampling.*` value is not a number, or one that no sampler
    takes.
    """
    chosen: dict[str, Any] = dict(catalogue or {})
    for name, parameter in SAMPLING.items():
        key = parameter.gguf_key
        if key is None or key not in metadata:
            continue
        value = metadata[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadGGUF(f"sampling default is not a number: {key}: {value!r:.40}")
        try:
            # An integer below the minimum means the minimum: -1 is vLLM's top_k for all tokens.
            number = max(int(value), int(parameter.minimum)) if parameter.kind is int else float(value)
            chosen[name] = RULES[name].check(number)
        except (ValueError, OverflowError) as error:
            raise BadGGUF(f"sampling default cannot be meant: {key}: {value}") from error
    return SamplingParams(**chosen)
