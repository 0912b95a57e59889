"""Tests of what a client gets when its request is run again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.types import TokenLogprob
from llmrun.engine.requests import PromptDelta, TextDelta, TokenLogprobs
from llmrun.serving.processes.deltas import DeliveredDeltas, ReplayDiffers

PROMPT = [PromptDelta(1, "a", (TokenLogprobs(TokenLogprob(7, b"a", 0.0), ()),)), PromptDelta(1, "")]
ANSWER: list[PromptDelta | TextDelta] = [
    *PROMPT,
    *(TextDelta(1, text, (number,)) for number, text in enumerate("the answer")),
]


@given(st.lists(st.integers(0, len(ANSWER)), max_size=4))
def test_every_delta_is_delivered_once(stops: list[int]) -> None:
    delivered, seen = DeliveredDeltas(), []
    for stop in [*stops, len(ANSWER)]:
        delivered.start_again()
        seen += [delta for delta in ANSWER[:stop] if delivered.new_bytes(delta)]
    assert seen == ANSWER
    assert delivered.count == len(ANSWER)


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (4, TextDelta(1, "x", (2,))),
        (4, TextDelta(1, "e", (99,))),
        (4, TextDelta(1, "e", (2,), reasoning="x")),
        (0, PromptDelta(1, "b", PROMPT[0].logprobs)),
        (0, PromptDelta(1, "a", (TokenLogprobs(TokenLogprob(7, b"a", -1.0), ()),))),
    ],
)
def test_a_different_replay_is_noticed(place: int, other: PromptDelta | TextDelta) -> None:
    delivered = DeliveredDeltas()
    for delta in ANSWER[:6]:
        delivered.new_bytes(delta)
    delivered.start_again()
    for delta in [*ANSWER[:place], other, *ANSWER[place + 1 : 5]]:
        assert delivered.new_bytes(delta) == 0
    assert delivered.behind
    with pytest.raises(ReplayDiffers):
        delivered.new_bytes(ANSWER[5])
