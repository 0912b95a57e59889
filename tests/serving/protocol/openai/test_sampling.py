"""Tests of the sampling parameters, logit_bias and seeds of requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.options.sampling_params import SAMPLING, SamplingParams
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.openai.options import choice_seed, seed_from
from tests.support.protocol.answers import FACTS, SEED, chat, completion
from tests.support.protocol.refusals import refused

NUMBERS = [(name, wire) for name, each in SAMPLING.items() if each.texts is None for wire in each.wire]


def sampling(**fields: Any) -> SamplingParams:
    return chat(**fields).requests[0].sampling


@pytest.mark.parametrize(("name", "wire"), NUMBERS)
def test_every_parameter_has_a_field(name: str, wire: str) -> None:
    other = 0.5 if SAMPLING[name].kind is float else 1
    other = other if other >= SAMPLING[name].minimum else SAMPLING[name].minimum
    assert getattr(sampling(**{wire: other}), name) == other
    assert completion(**{wire: other}).ignored == ()


@pytest.mark.parametrize(("name", "wire"), NUMBERS)
@pytest.mark.parametrize("value", [True, "1", [], {}, 10**400, -(10**400), 1e300])
def test_invalid_numbers_are_refused_by_name(name: str, wire: str, value: Any) -> None:
    assert refused(chat, wire, **{wire: value}).startswith(f"{wire}: expected a")


def test_null_means_the_model_s_default() -> None:
    assert sampling(temperature=None).temperature == FACTS.default_sampling.temperature


def test_integers_are_numbers_but_not_the_reverse() -> None:
    assert sampling(temperature=1).temperature == 1.0
    assert type(sampling(temperature=1).temperature) is float
    refused(chat, "top_k", "invalid_type", top_k=40.0)


def test_minus_one_disables_top_k() -> None:
    """As in vLLM."""
    assert sampling(top_k=-1).top_k == 0
    refused(chat, "top_k", top_k=-2)


def test_names_of_one_parameter_must_agree() -> None:
    assert sampling(repeat_penalty=1.1, repetition_penalty=1.1).repeat_penalty == 1.1
    refused(chat, "repetition_penalty", repeat_penalty=1.1, repetition_penalty=1.2)


@pytest.mark.parametrize("given", [["top_k", "temperature"], "top_k;temperature", "top-k;temp"])
def test_samplers_may_be_a_list(given: Any) -> None:
    assert sampling(samplers=given).samplers.replace("-", "_").startswith("top_k;temp")


def test_breakers_may_be_a_list() -> None:
    assert sampling(dry_sequence_breakers=["é", '"']).dry_sequence_breakers == '["é", "\\""]'
    assert sampling(dry_sequence_breakers=[]).dry_sequence_breakers == "[]"


@pytest.mark.parametrize("value", [["no_such"], [], "edkypmxt", 5, {"a": 1}, ["x"] * 20_000])
def test_invalid_samplers_are_refused(value: Any) -> None:
    refused(chat, "samplers", samplers=value)


def test_the_first_sampler_that_is_no_text_is_named() -> None:
    refused(chat, "samplers[1]", samplers=["temperature", 1])


def test_unknown_samplers_get_a_suggestion() -> None:
    with pytest.raises(InvalidField) as caught:
        chat(samplers=["temp", "top_kk"])
    assert caught.value.hint == "did you mean top_k?"


def test_a_bias_of_minus_100_bans_a_token() -> None:
    assert sampling(logit_bias={"5": -100, "6": 100, "7": -99.5}).logit_bias == {5: -math.inf, 6: 100.0, 7: -99.5}


def test_biases_may_be_pairs_and_false_bans_a_token() -> None:
    assert sampling(logit_bias=[[5, False], [6, 1.5], [7, -100]]).logit_bias == {5: -math.inf, 6: 1.5, 7: -math.inf}
    assert sampling(logit_bias=[[5, 1], [5, 2]]).logit_bias == {5: 2.0}
    facts = structs.replace(FACTS, info=replace(FACTS.info, vocabulary_size=10**8))
    assert chat(facts, logit_bias=[[12_345_678, 1]]).requests[0].sampling.logit_bias == {12_345_678: 1.0}
    assert sampling(logit_bias={"5": False}).logit_bias == {5: -math.inf}


def test_the_model_s_own_biases_are_kept() -> None:
    facts = structs.replace(FACTS, default_sampling=SamplingParams(logit_bias={1: 2.0, 5: 1.0}))
    assert chat(facts, logit_bias={"5": 3}).requests[0].sampling.logit_bias == {1: 2.0, 5: 3.0}


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ([[5]], "logit_bias[0]"),
        ([[5, 1], [5, 1, 1]], "logit_bias[1]"),
        ([[5, True]], "logit_bias[0]"),
        ([[5, 101]], "logit_bias[0]"),
        ([["5", 1]], "logit_bias[0][0]"),
        ([[1000, 1]], "logit_bias"),
        ([[5.5, 1]], "logit_bias"),
        ([[False, 1]], "logit_bias"),
        ({"a": 1}, "logit_bias"),
        ({"-1": 1}, "logit_bias"),
        ({"1000": 1}, "logit_bias"),
        ({"1" * 5000: 1}, "logit_bias"),
        ({"\u0663": 1}, "logit_bias"),
        ({"5": 101}, "logit_bias.5"),
        ({"5": "1"}, "logit_bias.5"),
        ({"5": True}, "logit_bias.5"),
    ],
)
def test_invalid_biases_are_refused(bias: Any, param: str) -> None:
    refused(chat, param, logit_bias=bias)


def test_ignore_eos_bans_the_end_tokens() -> None:
    assert sampling(ignore_eos=True).logit_bias == {2: -math.inf, 3: -math.inf}
    assert sampling(ignore_eos=False).logit_bias == {}
    facts = structs.replace(FACTS, end_tokens=())
    refused(lambda: chat(facts, ignore_eos=True), "ignore_eos", "unsupported_parameter")


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_the_first_choice_has_the_seed_of_the_request(seed: int) -> None:
    parsed = chat(seed=seed)
    assert (parsed.seed, parsed.requests[0].seed) == (seed, seed)


@pytest.mark.parametrize("seed", [None, -1])
def test_a_missing_seed_is_the_given_one(seed: int | None) -> None:
    assert chat(seed=seed).seed == SEED


def test_seeds_of_texts_are_spread_and_stable() -> None:
    seeds = [seed_from(str(number)) for number in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= each < 2**31 for each in seeds)
    assert seed_from("an ID") == 0x3C36B541  # clients rely on answers that can be repeated


@pytest.mark.parametrize("seed", [-2, 2**64, 1.0, "1", True, 10**400])
def test_invalid_seeds_are_refused(seed: Any) -> None:
    refused(chat, "seed", seed=seed)


def test_the_seeds_of_choices_never_change() -> None:
    """They are outputs of SplitMix64; for seed 0, these are the known first ones."""
    assert [choice_seed(0, choice) for choice in range(4)] == [
        0,
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert choice_seed(2**64 - 1, 1) == choice_seed(-1 & (2**64 - 1), 1) < 2**64
