"""Tests of sampling against plain, slow reference code."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.base.errors import LlmrunError, ModelFileError
from llmrun.engine import sampling
from llmrun.options.sampling_params import SamplingParams

pytestmark = pytest.mark.push

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def random_logits(size: int, seed: int = 0, decimals: int | None = None) -> NDArray[np.float32]:
    """Return normally distributed logits; with few decimals, many are equal."""
    values = np.random.default_rng(seed).normal(0, 3, size)
    return (values if decimals is None else values.round(decimals)).astype(np.float32)


def ranked(logits: NDArray[np.float32]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def reference(logits: NDArray[np.float32], params: SamplingParams) -> dict[int, float]:
    """Return the probability of each id that can be sampled, the textbook way.

    Sorts all ids, filters them, divides the logits by the temperature and normalizes.
    """
    ids = ranked(logits)
    if params.top_k > 0:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        reached, total = [], 0.0
        for token, share in zip(ids, softmax([float(logits[i]) for i in ids]), strict=True):
            reached.append(token)
            total += share
            if total >= params.top_p:
                break
        ids = reached
    if params.min_p > 0:
        shares = softmax([float(logits[i]) for i in ids])
        ids = [token for token, share in zip(ids, shares, strict=True) if share >= params.min_p * max(shares)]
    shares = softmax([float(logits[i]) / params.temperature for i in ids])
    return dict(zip(ids, shares, strict=True))


CHAINS = [
    OFF,
    replace(OFF, top_k=7),
    replace(OFF, top_p=0.9),
    replace(OFF, min_p=0.1),
    replace(OFF, top_p=0.8, min_p=0.2, temperature=0.5),
    SamplingParams(),
    replace(SamplingParams(), temperature=2.0, top_k=100, top_p=0.99),
]


@pytest.mark.cover(1)
@pytest.mark.parametrize("params", CHAINS)
@pytest.mark.parametrize("size", [50, 3000])
def test_draws_have_the_probabilities_of_the_chain(params: SamplingParams, size: int) -> None:
    logits = random_logits(size)
    expected = reference(logits, params)
    draws = 3000
    counts: dict[int, int] = {}
    for position in range(draws):
        token = sampling.sample(logits, [], params, position)
        counts[token] = counts.get(token, 0) + 1
    assert set(counts) <= set(expected)
    for token, share in expected.items():
        deviation = 5 * math.sqrt(draws * share * (1 - share)) + 1
        assert abs(counts.get(token, 0) - draws * share) <= deviation


@given(
    size=st.sampled_from([1, 2, 63, 64, 2047, 2048, 5001]),
    k=st.integers(1, 1100),
    seed=st.integers(0, 50),
    decimals=st.sampled_from([None, 1, 0]),
)
def test_top_k_is_a_sort_with_ties_to_the_lower_id(size: int, k: int, seed: int, decimals: int | None) -> None:
    logits = random_logits(size, seed, decimals)
    ids, values = sampling.top_k(logits, k)
    assert ids.tolist() == ranked(logits)[:k]
    assert values.tolist() == [float(logits[i]) for i in ids]


@given(size=st.integers(1, 400), p=st.floats(0, 1), seed=st.integers(0, 50), decimals=st.sampled_from([None, 0]))
def test_top_p_keeps_the_smallest_set_that_reaches_p(size: int, p: float, seed: int, decimals: int | None) -> None:
    logits = random_logits(size, seed, decimals)
    ids, _ = sampling.top_p(sampling.top_k(logits, 0), p)
    order = ranked(logits)
    if p < 1:
        assert ids.tolist() == order[: len(ids)]
    else:
        assert ids.tolist() == list(range(size))
    shares = softmax([float(logits[i]) for i in order])
    assert math.fsum(shares[: len(ids)]) >= p - 1e-9
    assert math.fsum(shares[: len(ids) - 1]) < p + 1e-9


def test_top_p_gives_the_same_set_before_and_after_sorting() -> None:
    logits = random_logits(5000)
    unsorted, _ = sampling.top_p(sampling.top_k(logits, 0), 0.9)
    presorted, _ = sampling.top_p(sampling.top_k(logits, 5000), 0.9)
    assert unsorted.tolist() == presorted.tolist()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_no_temperature_is_the_most_likely_token_and_the_lower_id_of_equals(temperature: float) -> None:
    logits = np.array([1, 5, 5, 2], np.float32)
    assert sampling.sample(logits, [], replace(OFF, temperature=temperature), 0) == 1


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(100)
    assert sampling.sample(logits, [], replace(OFF, temperature=1e-300), 0) == ranked(logits)[0]


@pytest.mark.parametrize("params", CHAINS)
def test_logits_are_left_alone(params: SamplingParams) -> None:
    logits = random_logits(3000)
    before = logits.copy()
    sampling.sample(logits, [1, 2], replace(params, repeat_penalty=1.5, logit_bias={3: 2.0}), 0)
    np.testing.assert_array_equal(logits, before)


def test_penalties_are_llama_cpps() -> None:
    logits = np.array([2.0, -2.0, 1.0, 3.0], np.float32)
    params = replace(OFF, repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    penalized = sampling.apply_penalties(logits, [0, 1, 1], params)
    assert penalized.tolist() == [2 / 2 - 0.25 - 0.5, -2 * 2 - 2 * 0.25 - 0.5, 1.0, 3.0]


@pytest.mark.parametrize(("last_n", "penalized"), [(0, []), (1, [2]), (2, [1, 2]), (-1, [0, 1, 2]), (99, [0, 1, 2])])
def test_penalties_look_back_as_far_as_told(last_n: int, penalized: list[int]) -> None:
    params = replace(OFF, presence_penalty=1.0, repeat_last_n=last_n)
    changed = sampling.apply_penalties(np.zeros(4, np.float32), [0, 1, 2], params)
    assert np.flatnonzero(changed).tolist() == penalized


def test_logit_bias_moves_and_bans() -> None:
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    greedy = replace(OFF, temperature=0)
    assert sampling.sample(logits, [], replace(greedy, logit_bias={2: 5.0}), 0) == 2
    assert sampling.sample(logits, [], replace(greedy, logit_bias={0: -math.inf}), 0) == 1
    banned = replace(OFF, logit_bias={0: -math.inf, 1: -math.inf})
    assert {sampling.sample(logits, [], banned, position) for position in range(200)} == {2}


@pytest.mark.parametrize("params", [replace(OFF, temperature=0), OFF, SamplingParams()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2500, 2999])
def test_broken_logits_are_an_error(params: SamplingParams, bad: float, at: int) -> None:
    logits = random_logits(3000)
    logits[at] = bad
    with pytest.raises(ModelFileError, match=f"largest logit is {bad}"):
        sampling.sample(logits, [], params, 0)


def test_logits_that_leave_no_token_are_the_models_fault() -> None:
    with pytest.raises(ModelFileError, match="largest logit is -inf"):
        sampling.sample(np.full(3, -np.inf, np.float32), [], OFF, 0)


def test_nothing_left_to_draw_is_an_error_but_not_the_models() -> None:
    everything = dict.fromkeys(range(3), -math.inf)
    with pytest.raises(LlmrunError, match="logit_bias bans every token") as caught:
        sampling.sample(np.zeros(3, np.float32), [], replace(OFF, logit_bias=everything), 0)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("at_once", [1e-9, 1.0, 3e38, 1e300])
def test_no_bias_and_no_penalty_is_too_large_to_draw(at_once: float) -> None:
    logits = np.array([3e38, -3e38, 0.0, 1.0], np.float32)
    params = SamplingParams(
        repeat_penalty=at_once, presence_penalty=-at_once, frequency_penalty=at_once, logit_bias={0: at_once}
    )
    assert sampling.sample(logits, [0, 1, 2, 2], params, 0) in range(4)


def test_the_draw_is_fixed_for_ever() -> None:
    """A changed hash would change the text of every seed, so these numbers must never be updated."""
    assert sampling._mix(0) == 0xE220A8397B1DCDAF  # the published first output of splitmix64 with seed 0
    draws = [sampling.uniform(seed, position) for seed, position in [(0, 0), (0, 1), (1, 0), (-1, 5), (2**64 + 1, 0)]]
    expected = [0.6524484863740322, 0.1663964394676608, 0.36818951565166946, 0.20852775745463303, 0.36818951565166946]
    assert draws == expected


def test_draws_are_uniform_over_positions_and_seeds() -> None:
    for values in (
        [sampling.uniform(7, position) for position in range(4000)],
        [sampling.uniform(seed, 7) for seed in range(4000)],
    ):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert abs(counts - 200).max() < 75
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200))
def test_every_u_draws_a_token_that_is_there(u: float, size: int) -> None:
    logits = random_logits(size).astype(np.float64)
    assert sampling.draw((np.arange(size), logits), 1.0, u) in range(size)


def test_exp_is_exact_to_two_units_and_zero_far_out() -> None:
    x = np.concatenate([-np.abs(np.random.default_rng(0).normal(0, 40, 9000)), [0.0, -1e-300, -699.0]])
    expected = np.array([math.exp(value) for value in x])
    assert (np.abs(sampling.exp(x) - expected) <= 2 * np.spacing(expected)).all()
    assert sampling.exp(np.array([-701.0, -1e300, -np.inf])).tolist() == [0, 0, 0]


def test_log_probabilities_are_of_the_raw_logits_and_sorted() -> None:
    logits = random_logits(500, decimals=0)
    chosen, top = sampling.log_probabilities(logits, 17, 5)
    shares = softmax(logits.tolist())
    assert chosen == pytest.approx(math.log(shares[17]))
    assert [token for token, _ in top] == ranked(logits)[:5]
    assert [value for _, value in top] == pytest.approx([math.log(shares[token]) for token, _ in top])
    assert sampling.log_probabilities(logits, 17, 0) == (chosen, [])
