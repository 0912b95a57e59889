"""Hypothesis strategies for requests and events."""

from __future__ import annotations

import math
from dataclasses import fields

from hypothesis import strategies as st

from llmrun.base.types import FinishReason, Timings, TokenLogprob
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import (
    ChatPrompt,
    ContextFile,
    FillPrompt,
    Finished,
    PrefillProgress,
    Request,
    TextDelta,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
    ToolCallDelta,
)
from llmrun.options.sampling_params import SAMPLING, SamplingParams

TEXT = st.text(st.characters(), max_size=8)  # with surrogates, which JSON from clients may have
IDS = st.integers(0, 2**31)
SECONDS = st.floats(0, 1e6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)

FILES = st.builds(ContextFile, TEXT, TEXT)
PROMPTS = (
    st.builds(
        ChatPrompt,
        st.lists(OBJECTS, max_size=3),
        st.none() | st.lists(OBJECTS, max_size=2),
        TEXT,
        st.booleans(),
        st.booleans(),
        OBJECTS,
    )
    | st.builds(TextPrompt, TEXT)
    | st.builds(FillPrompt, TEXT, TEXT, TEXT, st.lists(FILES, max_size=2).map(tuple), st.booleans())
    | st.builds(TokenPrompt, st.lists(IDS))
)
_NUMBERS = {
    name: {int: st.integers(), float: st.floats(allow_nan=False), str: TEXT}[parameter.kind]
    for name, parameter in SAMPLING.items()
}
BIASES = st.dictionaries(IDS, st.floats(allow_nan=False) | st.just(-math.inf), max_size=3)
PARAMS = st.builds(SamplingParams, **_NUMBERS, logit_bias=BIASES, seed=st.integers())
FORMATS = st.builds(ResponseFormat, st.sampled_from(FormatKind), TEXT, st.lists(TEXT, max_size=2).map(tuple), TEXT)
REQUESTS = st.builds(
    Request,
    PROMPTS,
    max_tokens=st.none() | IDS,
    stop=st.lists(TEXT, max_size=2).map(tuple),
    sampling=PARAMS,
    logprobs=st.none() | IDS,
    think=st.none() | st.booleans(),
    think_budget=st.none() | IDS,
    response_format=st.none() | FORMATS,
    sent_sampling=st.none() | st.frozensets(TEXT, max_size=3),
    tenant=TEXT,
)
_LOGPROBS = st.builds(TokenLogprob, IDS, st.binary(max_size=4), st.floats(allow_nan=False))
_MANY_LOGPROBS = st.lists(st.builds(TokenLogprobs, _LOGPROBS, st.lists(_LOGPROBS, max_size=2).map(tuple)), max_size=2)
_CALLS = st.lists(st.builds(ToolCallDelta, IDS, TEXT, TEXT, TEXT, TEXT), max_size=2)
DELTAS = st.builds(
    TextDelta,
    IDS,
    TEXT,
    st.lists(IDS, max_size=3).map(tuple),
    _MANY_LOGPROBS.map(tuple),
    TEXT,
    st.booleans(),
    st.booleans(),
    _CALLS.map(tuple),
)
_TIMINGS = st.builds(
    Timings,
    **{field.name: SECONDS if field.type == "float" else IDS for field in fields(Timings) if field.name != "gaps_s"},
    gaps_s=st.lists(SECONDS, max_size=3).map(tuple),
)
EVENTS = (
    DELTAS
    | st.builds(PrefillProgress, IDS, IDS, IDS)
    | st.builds(Finished, IDS, st.sampled_from(FinishReason), st.none() | TEXT, IDS, _TIMINGS, IDS, SECONDS, IDS)
)
