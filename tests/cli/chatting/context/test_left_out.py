"""Tests of how many of the oldest turns are left out: as few as fit, but in large steps."""

from __future__ import annotations

import pytest

from llmrun.cli.chatting.context import ROOM, room_for_answer, turns_to_leave_out


def left_out(sizes: list[int], already: int, context: int, max_tokens: int | None = None) -> int:
    """Return how many turns are left out, for turns of the given token counts."""
    return turns_to_leave_out(
        len(sizes), already, lambda first: sum(sizes[first:]), context=context, max_tokens=max_tokens
    )


def test_nothing_is_left_out_while_all_fits_with_room_for_the_answer() -> None:
    assert left_out([10] * 7, 0, context=100) == 0
    assert left_out([10] * 8, 0, context=100) == 3


def test_what_is_kept_fills_half_of_the_context() -> None:
    assert left_out([10] * 20, 0, context=100) == 15
    assert left_out([90, 10, 10], 0, context=100) == 1


def test_what_was_left_out_stays_out_until_the_rest_is_too_long_again() -> None:
    assert left_out([10] * 10, 3, context=100) == 3
    assert left_out([10] * 11, 3, context=100) == 6


def test_the_question_itself_always_stays() -> None:
    assert left_out([10, 200], 0, context=100) == 1
    assert left_out([200], 0, context=100) == 0
    assert left_out([10], 5, context=100) == 0


@pytest.mark.parametrize(
    ("context", "max_tokens", "room"),
    [(8192, None, ROOM), (8192, 20, 20), (8192, 4000, ROOM), (100, None, 25), (1, None, 1)],
)
def test_the_answer_gets_a_part_of_the_context(context: int, max_tokens: int | None, room: int) -> None:
    assert room_for_answer(context, max_tokens) == room
