"""Tests of the order of the samplers, and of draws with them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.base.errors import LlmrunError, ModelFileError
from llmrun.engine import samplers, sampling
from llmrun.engine.sampler import Sampler, SequenceRows, needs_samplers
from llmrun.engine.samplers import Place, SamplerState, initial_state
from llmrun.options.sampling_params import SamplingParams

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

# Each enables a sampler of the folder, or another order.
ENABLED = {
    "dry": replace(OFF, dry_multiplier=1.0, dry_penalty_last_n=-1),
    "top-n-sigma": replace(OFF, top_n_sigma=1.0),
    "typical": replace(OFF, typical_p=0.6),
    "xtc": replace(OFF, xtc_probability=0.5, xtc_threshold=0.02),
    "dynamic temperature": replace(OFF, dynatemp_range=0.9),
    "mirostat 1": replace(OFF, mirostat=1, mirostat_tau=3.0),
    "mirostat 2": replace(OFF, mirostat=2, mirostat_tau=3.0),
    "adaptive": replace(OFF, adaptive_target=0.3),
    "order": replace(OFF, samplers="temperature;min_p", temperature=2.0, min_p=0.2),
    "infill": replace(OFF, samplers="top_k;infill", top_k=40),
    "everything": SamplingParams(
        dry_multiplier=1.0, top_n_sigma=2.0, typical_p=0.9, xtc_probability=0.5, dynatemp_range=0.5, adaptive_target=0.3
    ),
}


def random_logits(size: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def draw(
    logits: NDArray[np.float32], params: SamplingParams, position: int = 0, state: SamplerState | None = None
) -> int:
    place = Place([], params, position, len(logits))
    return samplers.sample(logits, place, state or initial_state(params))[0]


@pytest.mark.parametrize("params", ENABLED.values(), ids=ENABLED)
def test_other_samplers_and_orders_need_the_chain(params: SamplingParams) -> None:
    assert needs_samplers(params)


def test_default_parameters_are_left_to_the_kernel() -> None:
    assert not needs_samplers(SamplingParams())
    assert not needs_samplers(replace(OFF, repeat_penalty=1.1, xtc_probability=1.0, xtc_threshold=0.6))


@given(
    size=st.sampled_from([1, 2, 100, 3000]),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_the_default_order_equals_the_definition(
    size: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty, seed=seed, logit_bias={0: 2.0})
    logits, history = random_logits(size, seed), [seed % size, 0]
    token, state = samplers.sample(logits, Place(history, params, 7, size), initial_state(params))
    assert token == sampling.sample(logits, history, params, 7)
    assert state == initial_state(params)


def test_the_order_matters() -> None:
    """At a high temperature, min-p keeps more tokens after the temperature than before it."""
    logits = np.array([3.0, 1.0, -9.0], np.float32)
    params = replace(OFF, temperature=2.0, min_p=0.2)
    drawn = {
        order: {draw(logits, replace(params, samplers=order), position) for position in range(200)}
        for order in ("min_p;temperature", "temperature;min_p")
    }
    assert drawn == {"min_p;temperature": {0}, "temperature;min_p": {0, 1}}


def test_samplers_that_are_not_listed_do_nothing() -> None:
    logits = np.array([3.0, 2.9], np.float32)
    params = SamplingParams(temperature=0.0, top_k=1, samplers="min_p")
    assert {draw(logits, params, position) for position in range(100)} == {0, 1}


@pytest.mark.push
@pytest.mark.parametrize("params", ENABLED.values(), ids=ENABLED)
def test_no_sampler_modifies_the_logits_or_draws_a_banned_token(params: SamplingParams) -> None:
    logits = random_logits(50)
    banned = dict.fromkeys(range(0, 50, 2), -math.inf)
    params = replace(params, logit_bias=banned, repeat_penalty=1.2, presence_penalty=0.5)
    before = logits.copy()
    history = list(range(50)) * 3
    for position in range(100):
        place = Place(history, replace(params, seed=position), position, 50)
        token, _ = samplers.sample(logits, place, initial_state(params))
        assert token % 2 == 1
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("params", ENABLED.values(), ids=ENABLED)
def test_one_token_is_enough_for_every_sampler(params: SamplingParams) -> None:
    assert draw(np.zeros(1, np.float32), params) == 0


@pytest.mark.parametrize("params", ENABLED.values(), ids=ENABLED)
def test_equal_logits_are_enough_for_every_sampler(params: SamplingParams) -> None:
    assert draw(np.zeros(200, np.float32), params) in range(200)


@pytest.mark.parametrize("params", ENABLED.values(), ids=ENABLED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_of_the_model(params: SamplingParams, bad: float) -> None:
    logits = random_logits(100)
    logits[70] = bad
    with pytest.raises(ModelFileError, match=f"largest logit is {bad}"):
        draw(logits, params)


@pytest.mark.parametrize("params", ENABLED.values(), ids=ENABLED)
def test_banning_every_token_is_an_error(params: SamplingParams) -> None:
    with pytest.raises(LlmrunError, match="bans every token"):
        draw(random_logits(3), replace(params, logit_bias=dict.fromkeys(range(3), -math.inf)))


def test_temperature_zero_is_greedy_after_xtc() -> None:
    logits = np.array([1.0, 3.0, 2.9, 2.8], np.float32)
    assert draw(logits, replace(OFF, temperature=0.0, xtc_probability=1.0)) == 3


@pytest.mark.push
def test_xtc_applies_as_often_as_its_probability_and_apart_from_the_draw() -> None:
    logits = np.zeros(2, np.float32)
    params = replace(OFF, xtc_probability=0.3)
    drawn = [draw(logits, params, position) for position in range(4000)]
    plain = [draw(logits, replace(OFF, samplers="temperature"), position) for position in range(4000)]
    changed = sum(one != other for one, other in zip(drawn, plain, strict=True))
    assert abs(changed / 4000 - 0.15) < 0.03  # XTC keeps token 1, which is drawn anyway in half of the cases


@pytest.mark.push
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [2.0, 4.0])
def test_mirostat_reaches_its_target_surprise(version: int, tau: float) -> None:
    params = replace(OFF, mirostat=version, mirostat_tau=tau)
    state, surprises = initial_state(params), []
    for position in range(400):
        logits = (-1.3 * np.log(np.arange(5000) + 1.0)).astype(np.float32)
        before = state.mu
        _, state = samplers.sample(logits, Place([], params, position, 5000), state)
        surprises.append((before - state.mu) / params.mirostat_eta + tau)
    assert abs(np.mean(surprises[100:]) - tau) < 0.4


def test_adaptive_p_draws_tokens_near_its_target() -> None:
    shares = np.array([0.6, 0.25, 0.1, 0.05])
    params = replace(OFF, adaptive_target=0.25)
    state, drawn = initial_state(params), []
    for position in range(300):
        token, state = samplers.sample(np.log(shares).astype(np.float32), Place([], params, position, 4), state)
        drawn.append(token)
    assert abs(np.mean(shares[drawn]) - 0.25) < 0.05
    assert np.mean(np.array(drawn) == 1) > 0.4


@pytest.mark.push
def test_rows_of_a_draft_carry_the_state_on() -> None:
    """The states of rows that are drawn together equal those of rows drawn one by one."""
    for params in ENABLED.values():
        logits = np.stack([random_logits(40, seed) for seed in range(5)])
        state, tokens, states = initial_state(params), [3], []
        for row in logits:
            states.append(state)
            token, state = samplers.sample(row, Place(tokens, params, len(tokens), 40), state)
            tokens.append(token)
        rows = SequenceRows(logits, [3], params, 1, tokens[1:5])
        (drawn,) = Sampler().sample_rows([rows])
        assert (drawn.tokens, drawn.states) == (tokens[1:], [*states, state])
