"""Tests of DRY and of its sequence breakers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine.sampler import Sampler, SequenceRows
from llmrun.engine.samplers import NO_BREAKERS, Place, dry, find_breakers
from llmrun.options.sampling_params import SamplingParams

TOKENIZER = ScriptedTokenizer()  # a token is a byte
SIZE = TOKENIZER.vocabulary_size
ON = SamplingParams(temperature=0.0, dry_multiplier=1.0, dry_base=2.0, dry_penalty_last_n=-1)


def penalties(text: str, params: SamplingParams = ON, breakers: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the penalty of each penalized character after a text."""
    place = Place(list(text.encode()), params, 0, SIZE, find_breakers(breakers, TOKENIZER))
    _, logits = dry((np.arange(SIZE), np.zeros(SIZE)), place)
    return {chr(token): -float(logits[token]) for token in np.flatnonzero(logits)}


def test_the_token_after_a_repetition_is_penalized_by_its_length() -> None:
    assert penalties("abcd-abc") == {"d": 2.0}  # 2 ** (3 - 2)
    assert penalties("abcd-bcd-abc-zbc") == {"d": 1.0, "-": 1.0}
    assert penalties("xa-ya-za") == {}


def test_the_longest_repetition_before_a_token_counts() -> None:
    assert penalties("xabcd-abcd-xabc")["d"] == 4.0


def test_a_repetition_does_not_extend_across_a_breaker() -> None:
    assert penalties("ab:cde-ab:cd", breakers=(":",)) == {"e": 1.0}
    assert penalties("ab:cde-ab:cd", breakers=("b:c",)) == {}
    assert penalties("ab:cde-ab:cd")["e"] == 8.0


def test_a_breaker_itself_is_not_penalized() -> None:
    assert penalties("abc:-abc", breakers=(":",)) == {}


def test_only_the_last_n_tokens_are_searched() -> None:
    assert penalties("abcd-----abc", replace(ON, dry_penalty_last_n=11)) == {"d": 1.0}
    assert penalties("abcd-----abc", replace(ON, dry_penalty_last_n=12)) == {"d": 2.0}


def test_penalties_are_finite() -> None:
    tokens = [7] * 3000
    _, logits = dry((np.arange(SIZE), np.zeros(SIZE)), Place(tokens, replace(ON, dry_multiplier=100.0), 0, SIZE))
    assert -np.inf < logits[7] < -1e38


def test_control_tokens_may_be_breakers() -> None:
    breakers = find_breakers(["<|im_end|>"], TOKENIZER)
    assert np.flatnonzero(breakers.single).tolist() == [259]


def test_a_tail_is_the_rest_of_the_breaker() -> None:
    breakers = find_breakers(["ab\n"], TOKENIZER)
    assert breakers.tails[97] == [tuple(b"b\n")]
    assert breakers.distance(np.array(list(b"xab\nyz"))[::-1]) == 2
    assert breakers.distance(np.array(list(b"xabyz"))[::-1]) == 5
    assert find_breakers([], TOKENIZER) is NO_BREAKERS


@pytest.mark.push
def test_a_request_without_dry_never_reads_the_vocabulary() -> None:
    class Unreadable(ScriptedTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            raise AssertionError

    params = SamplingParams(temperature=0.0, top_n_sigma=1.0)
    rows = SequenceRows(np.eye(1, SIZE, 5, dtype=np.float32), [1], params, 1, tokenizer=Unreadable())
    assert Sampler().sample_rows([rows])[0].tokens == [5]
    with pytest.raises(AssertionError):
        Sampler().sample_rows([structs.replace(rows, params=ON)])
