"""Tests that the sampling kernel equals its twin bit for bit, at every instruction-set level of this machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from llmrun.base.errors import LlmrunError, ModelFileError
from llmrun.engine import sampler as sampler_module
from llmrun.engine import sampling
from llmrun.engine.sampler import Drawn, Sampler, SequenceRows
from llmrun.formats.layouts.tokens import mask_words
from llmrun.options.sampling_params import SamplingParams
from tests.support.kernels.runs import LEVELS_HERE, at_level

pytestmark = pytest.mark.push

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = replace(OFF, temperature=0.0)
SIZES = (1, 2, 15, 16, 17, 100, 2047, 2048, 2049, 5001)  # around the sizes of vectors and stripes
SPECIAL = (-math.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-39, 3.4e38, -3.4e38, 700.0, -700.0, 1e-7)
CHAINS = (
    OFF,
    GREEDY,
    SamplingParams(),
    replace(OFF, top_k=7),
    replace(OFF, top_k=1500),
    replace(OFF, top_p=0.95),
    replace(OFF, top_p=0.0),
    replace(OFF, min_p=0.1),
    replace(OFF, top_p=0.8, min_p=0.2, temperature=0.5),
)


@functools.cache
def sampler_at(level: str, n_threads: int = 1) -> Sampler:
    with at_level(level):
        return Sampler(n_threads)


def draw(
    sampler: Sampler,
    logits: NDArray[np.float32],
    history: Sequence[int],
    params: SamplingParams,
    position: int = 0,
    mask: NDArray[np.uint32] | None = None,
) -> int:
    """Draw a single token, or raise its error."""
    masks = None if mask is None else mask[np.newaxis]
    (drawn,) = sampler.sample_rows([SequenceRows(logits[np.newaxis], history, params, position, masks=masks)])
    if drawn.error is not None:
        raise drawn.error
    return drawn.tokens[0]


def random_logits(size: int, seed: int, width: float = 3.0, decimals: int | None = None) -> NDArray[np.float32]:
    """Return normally distributed logits; with few decimals, many are equal."""
    values = np.random.default_rng(seed).normal(0, width, size)
    return (values if decimals is None else values.round(decimals)).astype(np.float32)


@st.composite
def logits_of_any_shape(draw: st.DrawFn) -> NDArray[np.float32]:
    size = draw(st.sampled_from(SIZES))
    width = draw(st.sampled_from([0.0, 1e-3, 1.0, 3.0, 40.0, 1e30]))
    logits = random_logits(size, draw(st.integers(0, 1000)), width, draw(st.sampled_from([None, 0, 1])))
    places = draw(st.lists(st.tuples(st.integers(0, size - 1), st.sampled_from(SPECIAL)), max_size=8))
    for place, value in places:
        logits[place] = value
    banned = draw(st.sampled_from([0.0, 0.5, 0.99]))
    logits[np.random.default_rng(size).random(size) < banned] = -np.inf
    return logits


def one_of(*special: float, others: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    return st.sampled_from(special) | others


PARAMS = st.builds(
    SamplingParams,
    temperature=one_of(0.0, 1e-300, 1.0, 100.0, others=st.floats(0, 3)),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 1024, 1025, 4000, 10**9]),
    top_p=one_of(0.0, 1e-12, 1 - 1e-16, 1.0, others=st.floats(0, 1)),
    min_p=one_of(0.0, 1e-300, 1.0, others=st.floats(0, 1)),
    repeat_penalty=one_of(1.0, 1e-9, 1e300, others=st.floats(0.01, 100)),
    presence_penalty=one_of(0.0, -100.0, 1e300, others=st.floats(-2, 2)),
    frequency_penalty=one_of(0.0, 1e30, -1e300, others=st.floats(-2, 2)),
    repeat_last_n=st.sampled_from([-1, 0, 1, 5, 64]),
    seed=st.integers(-(2**70), 2**70),
)
MASKED = st.sampled_from([None, 0.0, 0.5, 0.99, 1.0])  # the share of allowed tokens; None for no mask
BIASES = st.lists(st.sampled_from([-math.inf, -1e300, 0.0, 0.5, 1e38, 1e300]), max_size=4)


def random_mask(size: int, share: float, seed: int) -> NDArray[np.uint32]:
    """Return a mask that allows about this share of the tokens. The bits after the last token are random."""
    bits = np.random.default_rng(seed).random(32 * mask_words(size)) < share
    return np.packbits(bits, bitorder="little").view(np.uint32)


def outcome(call: object) -> object:
    """Return the result of a call without arguments, or the type and the text of its error."""
    try:
        return call()  # type: ignore[operator]
    except LlmrunError as error:
        return type(error), str(error)


@pytest.mark.parametrize("level", LEVELS_HERE)
@given(
    logits_of_any_shape(), PARAMS, BIASES, st.lists(st.integers(0, 10**6), max_size=80), st.integers(0, 10**6), MASKED
)
def test_draws_equal_the_twins(
    level: str,
    logits: NDArray[np.float32],
    params: SamplingParams,
    biases: list[float],
    history: list[int],
    position: int,
    share: float | None,
) -> None:
    mask = None if share is None else random_mask(len(logits), share, position)
    history = [token % len(logits) for token in history]
    params = replace(params, logit_bias={i * 7 % len(logits): bias for i, bias in enumerate(biases)})
    before = logits.copy()
    drawn = outcome(lambda: draw(sampler_at(level), logits, history, params, position, mask))
    assert drawn == outcome(lambda: sampling.sample(logits, history, params, position, mask))
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("params", CHAINS)
@pytest.mark.parametrize("size", [5001, 49_152])
def test_draws_of_large_vocabularies_equal_the_twins(level: str, params: SamplingParams, size: int) -> None:
    for seed, width in enumerate([0.1, 1.0, 3.0, 8.0]):
        logits = random_logits(size, seed, width)
        for position in range(5):
            expected = sampling.sample(logits, [], params, position)
            assert draw(sampler_at(level), logits, [], params, position) == expected


@pytest.mark.parametrize("level", LEVELS_HERE)
@given(logits_of_any_shape(), st.sampled_from([0, 1, 20, 1024, 10**6]))
def test_log_probabilities_equal_the_twins(level: str, logits: NDArray[np.float32], n: int) -> None:
    n = min(n, len(logits))
    found = sampler_at(level).log_probabilities(logits, 0, n)
    assert repr(found) == repr(sampling.log_probabilities(logits, 0, n))  # NaN has the same text


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2500, 2999])
@pytest.mark.parametrize("params", CHAINS)
def test_broken_logits_are_the_twins_error(bad: float, at: int, params: SamplingParams) -> None:
    logits = random_logits(3000, 0)
    logits[at] = bad
    with pytest.raises(ModelFileError, match=f"largest logit is {abs(bad)}"):
        draw(sampler_at(LEVELS_HERE[0]), logits, [], params, 0)
    chosen, top = sampler_at(LEVELS_HERE[0]).log_probabilities(logits, 1, 5)
    assert math.isnan(chosen)
    assert top == []


@pytest.mark.parametrize("params", [GREEDY, OFF, SamplingParams()])
def test_banning_every_token_is_the_twins_error(params: SamplingParams) -> None:
    everything = replace(params, logit_bias=dict.fromkeys(range(3), -math.inf))
    with pytest.raises(LlmrunError, match="logit_bias bans every token"):
        draw(sampler_at(LEVELS_HERE[0]), np.zeros(3, np.float32), [], everything, 0)


@pytest.mark.parametrize("params", CHAINS)
@pytest.mark.parametrize("size", [31, 5001])
def test_only_allowed_tokens_are_drawn(params: SamplingParams, size: int) -> None:
    for token in (0, 15, 16, 30, size - 1):
        mask = np.zeros(mask_words(size), np.uint32)
        mask[token // 32] = 1 << token % 32
        assert draw(sampler_at(LEVELS_HERE[0]), random_logits(size, token), [], params, 0, mask) == token


@pytest.mark.parametrize("token", [-1, 3, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_an_error(token: int) -> None:
    here = sampler_at(LEVELS_HERE[0])
    with pytest.raises(IndexError):
        draw(here, np.zeros(3, np.float32), [0, token], SamplingParams(repeat_penalty=1.1), 0)
    with pytest.raises(IndexError):
        draw(here, np.zeros(3, np.float32), [], SamplingParams(logit_bias={token: 1.0}), 0)


def different_sequences(rows: int, size: int = 6000) -> list[SequenceRows]:
    """Return a sequence for each chain and a few with penalties. Every draft is right up to its second last token."""
    penalized = replace(SamplingParams(), repeat_penalty=1.3, frequency_penalty=0.3)
    chains = [*CHAINS, penalized, replace(penalized, repeat_last_n=3), replace(OFF, presence_penalty=2.0)]
    sequences = []
    for seed, params in enumerate(chains):
        params = replace(params, seed=seed)
        logits = np.stack([random_logits(size, 100 * seed + row, decimals=1) for row in range(rows)])
        history = np.random.default_rng(seed).integers(0, size, 5 * seed).tolist()
        masks = np.stack([random_mask(size, 0.5, row) for row in range(rows)]) if seed % 2 else None
        free = SequenceRows(logits, history, params, len(history), [0] * (rows - 1), masks)
        tokens = one_by_one(free, drafted=False)
        draft = [*tokens[: rows - 2], (tokens[rows - 2] + 1) % size] if rows > 1 else []
        sequences.append(structs.replace(free, draft=draft))
    return sequences


def one_by_one(rows: SequenceRows, *, drafted: bool = True) -> list[int]:
    """Draw the rows of a sequence with the twin, up to the first that differs from the draft if `drafted`."""
    tokens: list[int] = []
    for index, row in enumerate(rows.logits):
        mask = None if rows.masks is None else rows.masks[index]
        history = [*rows.history, *tokens]
        tokens.append(sampling.sample(row, history, rows.params, rows.position + len(tokens), mask))
        if drafted and len(tokens) <= len(rows.draft) and tokens[-1] != rows.draft[len(tokens) - 1]:
            break
    return tokens


@pytest.mark.parametrize("n_threads", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_of_many_sequences_equal_single_draws(n_threads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_MANY_LOGITS", 0)
    sequences = different_sequences(rows)
    drawn = sampler_at(LEVELS_HERE[0], n_threads).sample_rows(sequences)
    assert drawn == [Drawn(one_by_one(sequence)) for sequence in sequences]
    assert all(len(one.tokens) == max(1, rows - 1) for one in drawn)


def test_a_whole_draft_yields_one_more_token() -> None:
    (sequence, *_) = different_sequences(4)
    right = structs.replace(sequence, draft=one_by_one(sequence, drafted=False)[:3])
    (drawn,) = sampler_at(LEVELS_HERE[0]).sample_rows([right])
    assert drawn.tokens == one_by_one(right)
    assert len(drawn.tokens) == 4


def test_an_error_keeps_the_draws_before_it() -> None:
    logits = np.stack([random_logits(100, row) for row in range(3)])
    logits[1, 7] = math.nan
    draft = [int(logits[0].argmax()), 5]
    fine = SequenceRows(logits[[0, 2]], [], GREEDY, 0, draft[:1])
    broken, whole = sampler_at(LEVELS_HERE[0]).sample_rows([SequenceRows(logits, [], GREEDY, 0, draft), fine])
    assert broken.tokens == draft[:1]
    assert isinstance(broken.error, ModelFileError)
    assert whole == Drawn([draft[0], int(logits[2].argmax())])


def test_logits_may_be_padded() -> None:
    padded = random_logits(64, 1).reshape(2, 32)
    draws = [SequenceRows(rows, [], OFF, 3, [1]) for rows in (padded[:, :20], padded[:, :20].copy())]
    first, second = (sampler_at(LEVELS_HERE[0]).sample_rows([draw]) for draw in draws)
    assert first == second


def test_no_rows_are_no_draws() -> None:
    assert sampler_at(LEVELS_HERE[0]).sample_rows([]) == []
