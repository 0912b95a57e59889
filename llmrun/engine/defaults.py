"""Default sampling parameters, taken from the model file, then from the catalogue, then from llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.problems import shown
from llmrun.options.sampling_params import SAMPLING, SamplingParameter, SamplingParams
from llmrun.options.settings import RULES


def default_sampling(metadata: Mapping[str, Any], catalogue: Mapping[str, float | str] | None = None) -> SamplingParams:
    """Return a model's default sampling parameters.

    metadata   the GGUF file's metadata; its `general.sampling.*` values take precedence
    catalogue  maps fields of SamplingParams to values from models.toml

    The seed is always 0. Raises BadGGUF if a `general.sampling.*` value has the wrong type or is out of range.
    """
    chosen: dict[str, Any] = dict(catalogue or {})
    for name, parameter in SAMPLING.items():
        key = parameter.gguf_key
        if key is None or key not in metadata:
            continue
        try:
            chosen[name] = RULES[name].check(_converted(metadata[key], key, parameter))
        except (ValueError, OverflowError) as error:
            raise BadGGUF(f"sampling default out of range: {key}: {shown(str(metadata[key]))}") from error
    return SamplingParams(**chosen)


def _converted(value: object, key: str, parameter: SamplingParameter) -> object:
    """Convert a value in a file to the parameter's type. Raises BadGGUF for another type of value."""
    if parameter.kind is str:
        if not isinstance(value, str):
            raise BadGGUF(f"sampling default is not text: {key}: {value!r:.40}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadGGUF(f"sampling default is not a number: {key}: {value!r:.40}")
    # Clamp integers to the minimum, because vLLM disables top-k with -1, whereas llmrun uses 0.
    return max(int(value), int(parameter.minimum)) if parameter.kind is int else float(value)
