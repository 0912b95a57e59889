"""The contract of speculation over any backend: drafts change neither the answers nor the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llmrun.base.types import FinishReason
from llmrun.engine.requests import Request, TokenPrompt
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.contract import (
    CancelledBefore,
    OverOneBackend,
    assert_books_agree,
    forget_all,
    plain_tokens,
)
from tests.support.engine.drafts import PROPOSALS, Adversary, assert_counts_add_up, assert_same, drafting_engine

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.engine.engine import Engine


class SpeculationContract(OverOneBackend):
    """Drafts of any kind, for prompts of most of the context, which is more than a window keeps."""

    def drafted_request(self, backend: Backend, seed: int) -> Request:
        room = backend.info.context_size - 2 * self.answer_tokens - 10
        return self.request(backend, plain_tokens(backend, room, seed=1) + plain_tokens(backend, 5, seed), seed=seed)

    def engine(self, backend: Backend, name: str, *requests: Request) -> Engine:
        """Return an engine with an empty cache that drafts from the requests' answers without drafts."""
        known = [(request, [*_prompt(request), *self.alone(backend, request).tokens]) for request in requests]
        forget_all(backend)
        sequences = lambda request: next(sequence for other, sequence in known if other == request)  # noqa: E731
        return drafting_engine(backend, Adversary(backend, PROPOSALS[name], sequences))

    def assert_drafted(self, backend: Backend, request: Request, gathered: Gathered) -> None:
        assert_counts_add_up(gathered.finished.timings)
        if self.exact:
            assert_same(gathered, self.alone(backend, request))
        else:
            self.assert_answers(backend, request, gathered)

    @pytest.mark.parametrize("name", ["right", "right, then wrong", "past the end", "mixed"])
    def test_any_drafts_change_no_answer(self, backend: Backend, name: str) -> None:
        requests = [self.drafted_request(backend, seed) for seed in (2, 3)]
        engine = self.engine(backend, name, *requests)
        together = answer_all(engine, requests)
        assert_books_agree(engine)
        assert all(gathered.finished.timings.drafted_tokens > 0 for gathered in together)
        for request, gathered in zip(requests, together, strict=True):
            self.assert_drafted(backend, request, gathered)

    @pytest.mark.parametrize("name", ["wrong", "noise", "ends", "mixed"])
    def test_rejected_drafts_leave_no_trace_in_the_cache(self, backend: Backend, name: str) -> None:
        """The logits of the next token equal those of a cache that has never seen a draft."""
        request = self.drafted_request(backend, seed=2)
        engine = self.engine(backend, name, request)
        answer_all(engine, [request])
        [slot] = [slot for slot in engine._slots._slots if slot.tokens]
        history = [*slot.tokens, *plain_tokens(backend, 1, seed=4)]
        logits = backend.forward(batch_of(rows(slot.index, len(history) - 1, history[-1:]))).logits[-1]
        forget_all(backend)
        expected = backend.forward(batch_of(rows(0, 0, history))).logits[-1]
        if self.exact:
            np.testing.assert_array_equal(logits, expected)
        else:
            np.testing.assert_allclose(logits, expected, rtol=0, atol=self.tolerance)

    def test_the_next_turn_reuses_what_was_right(self, backend: Backend) -> None:
        first = self.drafted_request(backend, seed=2)
        history = [*_prompt(first), *self.alone(backend, first).tokens]
        second = self.request(backend, history + plain_tokens(backend, 3, seed=5), self.answer_tokens // 2)
        engine = self.engine(backend, "right, then wrong", first, second)
        together = [*answer_all(engine, [first]), *answer_all(engine, [second])]
        assert_books_agree(engine)
        for request, gathered in zip((first, second), together, strict=True):
            self.assert_drafted(backend, request, gathered)

    def test_a_cancel_before_a_drafted_pass_stops_that_pass(self, backend: Backend) -> None:
        request = self.drafted_request(backend, seed=2)
        self.alone(backend, request)
        for number in range(1, 5):
            watched = CancelledBefore(backend, number)
            engine = self.engine(watched, "wrong", request)
            watched.begun = watched.done = 0
            watched.cancel_engine = engine.cancel_current
            [gathered] = answer_all(engine, [request])
            assert gathered.finished.reason is FinishReason.CANCELLED
            assert_counts_add_up(gathered.finished.timings)
            assert_books_agree(engine)
            [again] = answer_all(engine, [request])
            self.assert_drafted(backend, request, again)


def _prompt(request: Request) -> list[int]:
    assert isinstance(request.prompt, TokenPrompt)
    return list(request.prompt.tokens)
