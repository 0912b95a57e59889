"""Temperature, which may depend on the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.numbers import exp_of, log, softmax
from llmrun.formats.layouts.sampling import SMALLEST_TEMPERATURE
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.sampling import Candidates


def temperature(candidates: Candidates, place: Place) -> Candidates:
    """Divide the logits by the temperature, or return only the likeliest candidate at temperature 0."""
    return apply_temperature(candidates, temperature_of(candidates, place.params))


def apply_temperature(candidates: Candidates, value: float) -> Candidates:
    """Divide the logits by the temperature, or return only the likeliest candidate at temperature 0."""
    ids, logits = candidates
    if value <= 0:
        best = int(np.argmax(logits))
        return ids[best : best + 1], logits[best : best + 1]
    return ids, logits / max(value, SMALLEST_TEMPERATURE)


def temperature_of(candidates: Candidates, params: SamplingParams) -> float:
    """Return the temperature for these candidates.

    The dynamic temperature lies in `temperature` ± `dynatemp_range`, but not below 0. It grows with the entropy of the
    candidates, divided by that of equally likely ones, to the power of `dynatemp_exponent`.
    """
    spread = params.dynatemp_range
    _, logits = candidates
    if spread <= 0:
        return params.temperature
    if len(logits) < 2:
        return 1.0
    lowest, highest = max(0.0, params.temperature - spread), params.temperature + spread
    share = softmax(logits).entropy / log(len(logits))
    scaled = exp_of(params.dynatemp_exponent * log(share)) if share > 0 else float(params.dynatemp_exponent == 0)
    return lowest + (highest - lowest) * scaled
