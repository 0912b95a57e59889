"""Tests of the sampler for filling in the middle, against libllama's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.scripted import IM_END, ScriptedTokenizer
from llmrun.engine.samplers import Place, infill, initial_state, sample
from llmrun.options.sampling_params import SamplingParams
from tests.support.models.llama_samplers import LlamaSampler
from tests.support.tokenizers.vocabularies import llama_vocabulary, our_tokenizer

PARAMS = SamplingParams(samplers="top_k;infill", top_k=40, seed=1)
CASES = 400


@pytest.mark.push
def test_the_same_candidates_are_kept_as_by_libllama() -> None:
    """Candidates are words that begin like others, other tokens, and tokens that end an answer."""
    name = "starcoder"
    tokenizer, vocabulary = our_tokenizer(name), llama_vocabulary(name)
    place = Place([], PARAMS, 0, tokenizer.vocabulary_size, tokenizer=tokenizer, end=tokenizer.eos_id)
    related = tokenizer.encode("r re ret return returns s se self", add_special=False, parse_special=False)
    words = [token for token in range(300, 40_000) if tokenizer.token_bytes(token).startswith((b"re", b"se", b" re"))]
    ends = sorted(tokenizer.end_of_generation)
    random = np.random.default_rng(3)
    outcomes = set()
    with LlamaSampler("infill", vocabulary.handle) as oracle:
        for _ in range(CASES):
            pool = np.unique([*related.tolist(), *random.choice(words, 30), *random.integers(300, 40_000, 10)])
            ids = random.choice(pool, random.integers(2, 40), replace=False)
            ids = np.unique([*ids, *random.choice(ends, random.integers(0, 2))])
            logits = random.normal(0, random.choice((0.5, 2, 6)), len(ids)).astype(np.float32)
            logits[np.isin(ids, ends)] -= random.choice((0, 5, 12))
            theirs = oracle.apply(ids, logits).ids.tolist()
            ours = infill((ids, logits.astype(np.float64)), place)[0].tolist()
            assert sorted(ours) == sorted(theirs)
            outcomes.add((len(ours) > 1, tokenizer.end_of_generation >= {*ours}))
    assert outcomes >= {(False, False), (False, True), (True, False)}


def drawn(logits: NDArray[np.float32], params: SamplingParams = PARAMS, *, ends: bool = True) -> int:
    tokenizer = ScriptedTokenizer()
    if not ends:
        params = replace(params, logit_bias=dict.fromkeys(tokenizer.end_of_generation, -np.inf))
    place = Place([], params, 0, len(logits), tokenizer=tokenizer)
    return sample(logits, place, initial_state(params))[0]


def unsure() -> NDArray[np.float32]:
    """Return logits by which no token has a probability of 0.2."""
    logits = np.full(ScriptedTokenizer().vocabulary_size, -30.0, np.float32)
    logits[[*b"abcdefgh"]] = 1.0
    return logits


def test_an_answer_ends_where_no_token_is_likely() -> None:
    logits = unsure()
    logits[IM_END] = -20.0
    assert drawn(logits) == IM_END


def test_an_answer_that_must_not_end_goes_on() -> None:
    assert drawn(unsure(), ends=False) == ord("a")


def test_an_end_that_is_likely_enough_wins() -> None:
    logits = unsure()
    logits[ord("a")], logits[IM_END] = 10.0, 6.0
    assert drawn(logits) == IM_END
    assert drawn(logits, replace(PARAMS, samplers="top_k;temperature", temperature=0)) == ord("a")


@pytest.mark.parametrize("texts", [[b"hel", b"hell", b"hello", b"dummy"]])
def test_probabilities_of_common_beginnings_are_added(texts: list[bytes]) -> None:
    class Words(ScriptedTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return texts[token_id] if token_id < len(texts) else b""

    place = Place([], PARAMS, 0, 300, tokenizer=Words())
    logits = np.log(np.array([0.19, 0.18, 0.17, 0.15]))
    kept, _ = infill((np.arange(4), logits), place)
    assert kept.tolist() == [0]
