"""Tests of when a download is retried, and when it gets more connections."""

from __future__ import annotations

import pytest

from llmrun.base.errors import NetworkError
from llmrun.hub.remote import http_ranges
from llmrun.hub.remote.http_ranges import (
    LONGEST_WAIT_S,
    MOST_CONNECTIONS,
    PROGRESS,
    TRIES,
    TRIES_ON_THE_WAY,
    Growth,
    Patience,
    TryAgain,
)

TROUBLE = TryAgain("timed out")
GB = 10**9


def test_waits_grow_and_end_in_one_sentence_with_the_numbers() -> None:
    waiting = Patience("m.gguf", 2_000_000, 5)
    waits = [waiting.wait_after(TROUBLE, 5) for _ in range(TRIES - 1)]
    assert waits == sorted(waits)
    assert waits[-1] <= LONGEST_WAIT_S
    with pytest.raises(
        NetworkError, match=r"^m\.gguf: timed out: gave up after 6 tries, with 5 of 2,000,000 bytes received$"
    ):
        waiting.wait_after(TROUBLE, 5)


def test_progress_begins_the_count_anew_and_going_back_does_not() -> None:
    waiting = Patience("m.gguf", GB, 0)
    for step in range(100):
        assert waiting.wait_after(TROUBLE, (step + 1) * PROGRESS) == http_ranges.FIRST_WAIT_S
    for _ in range(TRIES_ON_THE_WAY - 2):
        waiting.wait_after(TROUBLE, 50 * PROGRESS)
    with pytest.raises(NetworkError):
        waiting.wait_after(TROUBLE, 100 * PROGRESS + 1)


def test_an_outage_of_more_than_a_minute_does_not_end_a_download_on_its_way() -> None:
    waiting = Patience("m.gguf", GB, 0)
    waits = [waiting.wait_after(TROUBLE, PROGRESS) for _ in range(TRIES_ON_THE_WAY - 1)]
    assert sum(waits) > 80
    with pytest.raises(NetworkError, match="16 tries"):
        waiting.wait_after(TROUBLE, PROGRESS)


def test_a_server_that_names_a_time_gets_it() -> None:
    assert Patience("m", 1, 0).wait_after(TryAgain("busy", after=17.0), 0) == 17.0


def advised(rate_of: dict[int, float], size: int = 100 * GB) -> list[int]:
    """Return the connection counts over time of a download with the given bytes per second for each count."""
    growth, now, received, connections = Growth(0.0, 0), 0.0, 0.0, 1
    numbers = []
    for _ in range(200):
        now += 0.1
        received += 0.1 * rate_of[connections]
        connections = growth.advise(now, int(received), int(size - received), connections)
        numbers.append(connections)
    return numbers


def test_a_limit_of_each_connection_is_met_with_more_of_them() -> None:
    numbers = advised({1: 10e6, 2: 20e6, 4: 40e6, 8: 80e6})
    assert list(dict.fromkeys(numbers)) == [1, 2, 4, 8]
    assert numbers[-1] == MOST_CONNECTIONS


def test_a_line_that_is_full_keeps_one_connection() -> None:
    numbers = advised({1: 10e6, 2: 10.5e6})
    assert set(numbers) == {1, 2}
    assert numbers[25:] == [1] * (len(numbers) - 25)


def test_a_line_that_is_full_with_four_goes_back_to_those() -> None:
    assert advised({1: 10e6, 2: 20e6, 4: 40e6, 8: 41e6})[-1] == 4


def test_there_are_never_more_than_the_most() -> None:
    growth = Growth(0.0, 0)
    assert growth.advise(2.0, GB, 100 * GB, 6) == MOST_CONNECTIONS


def test_what_is_nearly_here_gets_no_second_connection() -> None:
    assert set(advised({1: 10e6}, size=20_000_000)) == {1}


def test_a_stall_is_not_taken_for_a_measurement() -> None:
    growth = Growth(0.0, 100)
    assert growth.advise(5.0, 100, GB, 1) == 1
    assert growth.advise(5.5, 200, GB, 1) == 1
    assert growth.advise(6.0, 10_000_100, GB, 1) == 2
