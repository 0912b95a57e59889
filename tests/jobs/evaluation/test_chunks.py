"""Tests of how a text is cut into chunks: as llama-perplexity does it."""

from __future__ import annotations

import pytest

from llmrun.base.errors import UsageError
from llmrun.jobs.evaluation.measuring import added_bos, chunks_of, tokens_of
from tests.support.evaluation.letters import Letters


def test_chunks_are_consecutive_and_only_the_second_half_is_scored() -> None:
    first, second = chunks_of("abcdefghijklmnopqrs", Letters(), 8)
    assert bytes(first.inputs.tolist()) == b"abcdefg"
    assert (first.first, bytes(first.following.tolist())) == (4, b"fgh")
    assert bytes(second.inputs.tolist()) == b"ijklmno"
    assert (second.first, bytes(second.following.tolist())) == (4, b"nop")
    assert second.scored == 3


def test_a_bos_replaces_the_first_token_of_every_chunk() -> None:
    first, second = chunks_of("abcdefghijklmno", Letters(bos=1), 8)
    assert bytes(first.inputs.tolist()) == b"\1abcdef"
    assert bytes(second.inputs.tolist()) == b"\1ijklmn"  # h is lost, as in llama-perplexity
    assert bytes(second.following.tolist()) == b"mno"


def test_an_eos_is_not_part_of_the_text() -> None:
    assert bytes(tokens_of("abc", Letters(eos=2)).tolist()) == b"abc"
    assert bytes(tokens_of("abc", Letters(bos=1, eos=2)).tolist()) == b"\1abc"
    assert added_bos(Letters(eos=2)) is None
    assert added_bos(Letters(bos=1, eos=2)) == 1


def test_only_as_many_chunks_as_asked_for() -> None:
    assert len(chunks_of("a" * 100, Letters(), 8)) == 12
    assert len(chunks_of("a" * 100, Letters(), 8, 3)) == 3


@pytest.mark.parametrize(("text", "hint"), [("a" * 15, "--context 15"), ("abc", "use a longer text")])
def test_a_text_that_does_not_fill_a_chunk_is_refused(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"{len(text)} tokens do not fill a chunk of 16") as refused:
        chunks_of(text, Letters(), 16)
    assert refused.value.hint.endswith(hint)
