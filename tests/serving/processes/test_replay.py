"""Tests of what a client gets when its request is run again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.requests import TextDelta
from llmrun.serving.processes.request import DeliveredDeltas, ReplayDiffers

ANSWER = [TextDelta(1, text, (number,)) for number, text in enumerate("the answer")]


@given(st.lists(st.integers(0, len(ANSWER)), max_size=4))
def test_every_delta_is_delivered_once(stops: list[int]) -> None:
    delivered, seen = DeliveredDeltas(), []
    for stop in [*stops, len(ANSWER)]:
        delivered.start_again()
        seen += [delta for delta in ANSWER[:stop] if delivered.new_bytes(delta)]
    assert seen == ANSWER
    assert delivered.count == len(ANSWER)


@pytest.mark.parametrize(
    "other", [TextDelta(1, "x", (2,)), TextDelta(1, "e", (99,)), TextDelta(1, "e", (2,), reasoning="x")]
)
def test_a_different_replay_is_noticed(other: TextDelta) -> None:
    delivered = DeliveredDeltas()
    for delta in ANSWER[:4]:
        delivered.new_bytes(delta)
    delivered.start_again()
    for delta in [*ANSWER[:2], other]:
        assert delivered.new_bytes(delta) == 0
    assert delivered.behind
    with pytest.raises(ReplayDiffers):
        delivered.new_bytes(ANSWER[3])
