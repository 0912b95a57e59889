"""Test the measurements on cases with known results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.models.downloads import smollm2
from tests.support.models.fidelity import Divergence, divergences, kl_divergence, perplexities
from tests.support.models.prompts import long_text, passages, prompts
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary


def logits(*probabilities: float) -> NDArray[np.float32]:
    return np.log(np.array([probabilities], np.float32))


def test_kl_divergence_of_two_coins() -> None:
    fair, bent = logits(0.5, 0.5), logits(0.9, 0.1)
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert kl_divergence(fair, [bent])[0] == pytest.approx([expected], rel=1e-6)
    backwards = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    assert kl_divergence(bent, [fair])[0] == pytest.approx([backwards], rel=1e-6)


def test_kl_divergence_sees_no_constant_added_to_all_logits_but_every_other_change() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 1000)).astype(np.float32)
    assert kl_divergence(x, [x + np.float32(8)])[0] == pytest.approx(0, abs=1e-12)
    noise = (1e-4 * random.standard_normal(x.shape)).astype(np.float32)
    # To second order, the divergence is half the variance of the change, here 5e-9.
    assert kl_divergence(x, [x + noise])[0] == pytest.approx(5e-9, rel=0.2)


def test_a_mean_is_over_positions_and_its_interval_holds_it() -> None:
    uneven = Divergence(np.array([2.0, 0.0, 1.0]), np.array([1, 1, 4]))
    assert uneven.mean == 0.5
    low, high = uneven.interval()
    assert 0 <= low < uneven.mean < high <= 2


def test_a_ratio_is_taken_in_pairs() -> None:
    some = Divergence(np.array([2.0, 0.5, 1.0]), np.array([1, 1, 4]))
    twice = Divergence(2 * some.sums, some.counts)
    assert twice.ratio_interval(some) == pytest.approx((2, 2))
    assert twice.interval() != some.interval()


def test_divergences_ask_every_model_for_every_prompt() -> None:
    def fair(tokens: Sequence[int]) -> NDArray[np.float32]:
        return np.repeat(logits(0.5, 0.5), len(tokens), axis=0)

    def bent(tokens: Sequence[int]) -> NDArray[np.float32]:
        return np.repeat(logits(0.9, 0.1), len(tokens), axis=0)

    measured = divergences(fair, {"same": fair, "bent": bent}, [[0, 1], [1, 0, 1]])
    assert measured["same"].mean == pytest.approx(0, abs=1e-12)
    assert measured["bent"].mean == pytest.approx(0.5108, abs=1e-4)
    assert measured["bent"].counts.tolist() == [2, 3]


def test_perplexity_of_a_model_that_knows_nothing_is_the_size_of_its_vocabulary() -> None:
    measured = perplexities({"flat": lambda tokens: np.zeros((len(tokens), 7), np.float32)}, [1, 2, 3] * 400)
    assert measured["flat"].value == pytest.approx(7)
    assert measured["flat"].predicted == 1200 - 3  # windows of 512, 512 and 176 tokens, without the first token of each


def test_perplexity_is_of_the_token_that_follows() -> None:
    def next_is_one_more(tokens: Sequence[int]) -> NDArray[np.float32]:
        """Give a probability of about one half to the successor of each token."""
        chances = np.full((len(tokens), 9), 0.5 / 9, np.float32)
        chances[np.arange(len(tokens)), np.array(tokens) + 1] += 0.5
        return np.log(chances)

    measured = perplexities({"half": next_is_one_more}, range(8))
    assert measured["half"].value == pytest.approx(1 / (0.5 + 0.5 / 9))


def test_the_passages_are_what_the_measurements_need() -> None:
    tokenizer = LlamaVocabulary(smollm2())
    assert len(passages()) >= 50
    assert len(set(passages())) == len(passages())
    assert min(len(prompt) for prompt in prompts(tokenizer, 10_000)) >= 64
    assert len(long_text(tokenizer)) > 8_500
