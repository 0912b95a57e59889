"""Tests that a model's own sampling defaults win over the catalogue's, which win over llama.cpp's."""

from __future__ import annotations

import pytest
from gguf import Keys

from llmrun.base.errors import BadGGUF
from llmrun.options.sampling_params import SamplingParams
from llmrun.options.settings import default_sampling


def test_without_anything_they_are_llama_cpps() -> None:
    defaults = default_sampling({})
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.8, 40, 0.95, 0.05)
    assert (defaults.repeat_penalty, defaults.presence_penalty, defaults.frequency_penalty) == (1, 0, 0)
    assert defaults == SamplingParams()


def test_the_model_wins_over_the_catalogue() -> None:
    metadata = {
        Keys.General.SAMPLING_TEMP: 0.6,
        Keys.General.SAMPLING_TOP_K: 20,
        Keys.General.SAMPLING_TOP_P: 0.9,
        Keys.General.SAMPLING_MIN_P: 0.0,
        Keys.General.SAMPLING_PENALTY_REPEAT: 1.1,
        Keys.General.SAMPLING_PENALTY_LAST_N: 32,
    }
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.0, repeat_penalty=1.1, repeat_last_n=32)
    assert default_sampling(metadata, {"temperature": 0.1, "top_k": 1}) == expected


def test_the_catalogue_fills_in_what_the_model_leaves_open() -> None:
    defaults = default_sampling({Keys.General.SAMPLING_TEMP: 1}, {"temperature": 0.2, "top_p": 0.5})
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 0.5, 40)


def test_integers_below_the_range_mean_its_lower_end() -> None:
    defaults = default_sampling({Keys.General.SAMPLING_TOP_K: -1, Keys.General.SAMPLING_PENALTY_LAST_N: -2})
    assert (defaults.top_k, defaults.repeat_last_n) == (0, -1)


def test_the_models_samplers_and_mirostat_are_defaults_too() -> None:
    metadata = {
        Keys.General.SAMPLING_SEQUENCE: "top_k;Temp",
        Keys.General.SAMPLING_MIROSTAT: 2,
        Keys.General.SAMPLING_XTC_PROBABILITY: 0.5,
    }
    expected = SamplingParams(samplers="top_k;Temp", mirostat=2, xtc_probability=0.5)
    assert default_sampling(metadata, {"samplers": "min_p"}) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [(5, "not text"), ("", "out of range"), ("top_k;\x1b[31m", r"out of range: .*: top_k;\\x1b\[31m$")],
)
def test_samplers_that_do_not_exist_are_a_bad_file(value: object, words: str) -> None:
    with pytest.raises(BadGGUF, match=words):
        default_sampling({Keys.General.SAMPLING_SEQUENCE: value})


@pytest.mark.parametrize("value", ["hot", None, [0.5], True])
def test_a_default_that_is_no_number_is_a_bad_file(value: object) -> None:
    with pytest.raises(BadGGUF, match=r"general\.sampling\.temp"):
        default_sampling({Keys.General.SAMPLING_TEMP: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((Keys.General.SAMPLING_TEMP, value) for value in (-0.5, float("nan"), float("inf"))),
        *((Keys.General.SAMPLING_TOP_K, value) for value in (float("nan"), float("inf"))),
        *((Keys.General.SAMPLING_TOP_P, value) for value in (-0.1, 1.5)),
        (Keys.General.SAMPLING_PENALTY_REPEAT, 0.0),
    ],
)
def test_a_default_that_no_sampler_takes_is_a_bad_file(key: str, value: float) -> None:
    with pytest.raises(BadGGUF, match=f"sampling default out of range: {key}: {value}"):
        default_sampling({key: value})
