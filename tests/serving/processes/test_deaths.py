"""Tests of which requests survive the end of the engine's process."""

from __future__ import annotations

from asyncio import Event

import pytest

from llmrun.base.errors import BackendCrashed, LlmrunError
from llmrun.base.types import FinishReason
from llmrun.engine.requests import Finished, Request, TextDelta, TextPrompt
from llmrun.serving.processes.request import Phase, ServedRequest, replay_order, sort_out


def served(number: int, phase: Phase, *, deltas: int = 0) -> ServedRequest:
    request = ServedRequest(
        number, Request(TextPrompt("x")), 0.0, 10, 1000, Event(), lambda: None, lambda request: None, phase
    )
    request.has_begun = phase is Phase.BEGUN
    for _ in range(deltas):
        request.put(TextDelta(number, "x", (1,)))
    return request


def end(
    *requests: ServedRequest,
    alone: ServedRequest | None = None,
    preparing: ServedRequest | None = None,
    batch_invariant: bool = True,
) -> list[int]:
    """End the process, and return the ids of the requests that failed."""
    begun = [request for request in requests if request.phase is Phase.BEGUN]
    sort_out(requests, alone, preparing, batch_invariant=batch_invariant, reason="SIGKILL")
    for request in begun:  # as after a replay
        request.phase = Phase.BEGUN
    return [request.id for request in requests if request.over]


def test_requests_that_had_not_begun_survive_any_number_of_deaths() -> None:
    for phase in (Phase.HELD, Phase.QUEUED):
        request = served(1, phase)
        assert [end(request) for _ in range(50)] == [[]] * 50
        assert request.phase is Phase.HELD


def test_a_begun_request_survives_one_death() -> None:
    request = served(1, Phase.BEGUN, deltas=3)
    assert [end(request), end(request)] == [[], [1]]
    assert isinstance(request._error, BackendCrashed)  # which clients do not retry
    assert str(request._error) == "the engine ended repeatedly while it ran this request: SIGKILL"


def test_a_death_in_a_step_alone_counts_only_against_that_request() -> None:
    alone, other, new = served(1, Phase.BEGUN), served(2, Phase.BEGUN), served(3, Phase.BEGUN)
    assert end(alone, other) == []
    assert end(alone, other, new, alone=alone) == [1]
    assert (other.deaths, new.deaths) == (1, 0)


def test_a_request_whose_preparation_is_deadly_fails() -> None:
    requests = [served(1, Phase.QUEUED), served(3, Phase.SENT), served(2, Phase.SENT)]
    failed = []
    for _ in range(3):
        failed.append(end(*requests, preparing=requests[2]))
        for request in requests[1:]:
            request.phase = Phase.SENT
    assert failed == [[], [], [2]]


def test_a_request_that_was_prepared_long_ago_is_not_to_blame() -> None:
    request = served(1, Phase.QUEUED)
    assert [end(request, preparing=request) for _ in range(5)] == [[]] * 5


def test_without_batch_invariance_delivered_text_cannot_be_replayed() -> None:
    silent, speaking, queued = served(1, Phase.BEGUN), served(2, Phase.BEGUN, deltas=1), served(3, Phase.QUEUED)
    assert end(silent, speaking, queued, batch_invariant=False) == [2]


def test_cancelled_requests_end_with_their_process() -> None:
    request = served(1, Phase.BEGUN)
    request.cancelled = True
    assert end(request) == [1]
    _, event = request.take()[-1]
    assert isinstance(event, Finished)
    assert event.reason is FinishReason.CANCELLED


def test_requests_that_had_begun_are_replayed_first() -> None:
    requests = [served(1, Phase.QUEUED), served(2, Phase.BEGUN), served(3, Phase.SENT), served(4, Phase.BEGUN)]
    end(*requests)
    assert [request.id for request in replay_order(requests)] == [2, 4, 1, 3]


def test_the_error_follows_the_events_before_it() -> None:
    request = served(1, Phase.BEGUN, deltas=2)
    request.fail(LlmrunError("no more"))
    assert [type(event) for _, event in request.take()] == [TextDelta, TextDelta]
    with pytest.raises(LlmrunError, match="no more"):
        request.take()
