"""Tells which requests need the samplers of this folder, without importing them."""

from __future__ import annotations

from llmrun.base.sampling_texts import DEFAULT_SAMPLERS, parse_samplers
from llmrun.options.sampling_params import SamplingParams

_DEFAULT_ORDER = parse_samplers(DEFAULT_SAMPLERS)


def needs_chain(params: SamplingParams) -> bool:
    """Return whether a request uses a sampler of this folder, or another order than sampling.py."""
    return (
        parse_samplers(params.samplers) != _DEFAULT_ORDER
        or uses_dry(params)
        or params.top_n_sigma > 0
        or params.typical_p < 1
        or uses_xtc(params)
        or params.dynatemp_range > 0
        or params.mirostat != 0
        or params.adaptive_target >= 0
    )


def uses_dry(params: SamplingParams) -> bool:
    """Return whether DRY penalizes anything."""
    return params.dry_multiplier != 0 and params.dry_penalty_last_n != 0


def uses_xtc(params: SamplingParams) -> bool:
    """Return whether XTC may remove tokens. No two tokens have probabilities above 0.5."""
    return params.xtc_probability > 0 and params.xtc_threshold <= 0.5
