"""Scripted models and requests for the engine tests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from msgspec import structs

from llmrun.backends.scripted import IM_END, ScriptedBackend
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.options.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(seed=42)


def noisy(**options: int) -> ScriptedBackend:
    """Return a model that generates random tokens. It never ends by itself if the request is `endless`."""
    return ScriptedBackend(None, **options)  # type: ignore[arg-type]


def endless(request: Request) -> Request:
    """Return the request with the end-of-generation tokens banned."""
    return structs.replace(request, sampling=replace(request.sampling, logit_bias={257: -math.inf, IM_END: -math.inf}))


def random_prompt(length: int, seed: int = 0) -> TokenPrompt:
    return TokenPrompt(np.random.default_rng(seed).integers(0, 256, length).tolist())


def random_request(length: int, seed: int = 0, *, max_tokens: int | None = 20) -> Request:
    return endless(Request(random_prompt(length, seed), max_tokens, sampling=replace(DRAWN, seed=seed)))
