"""Tests of requests that share a prefix which one of them is still computing.

The scripted backend records every batch, so the tests can count the rows. The contract in tests/support/engine has the
tests that hold for all backends.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.types import FinishReason
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.engine.scheduling.scheduler import LEAST_SHARED
from tests.support.engine.answers import Gathered, answer_all, run_to_the_end
from tests.support.engine.contract import assert_books_agree
from tests.support.engine.scripted_models import endless, noisy, random_prompt, random_request


def samples(count: int, length: int, *, max_tokens: int = 20, logprobs: int | None = None) -> list[Request]:
    """Return requests with the same prompt of random tokens and the seeds 0 to count - 1."""
    first = structs.replace(random_request(length, max_tokens=max_tokens), logprobs=logprobs)
    return [structs.replace(first, sampling=replace(first.sampling, seed=seed)) for seed in range(count)]


def rows(backend: ScriptedBackend) -> int:
    return sum(len(batch.tokens) for batch in backend.batches)


def alone(request: Request) -> Gathered:
    [gathered] = answer_all(Engine(noisy()), [request])
    return gathered


@pytest.mark.push
@pytest.mark.parametrize("checkpoint", [None, 16])
@pytest.mark.parametrize("rows_per_step", [1, 24, 256])
def test_samples_compute_their_prompt_once(rows_per_step: int, checkpoint: int | None) -> None:
    backend = ScriptedBackend(None, max_sequences=4, checkpoint=checkpoint)
    requests = samples(4, 100, logprobs=2)
    together = answer_all(Engine(backend, rows_per_step=rows_per_step), requests)
    assert rows(backend) == 99 + 4 * 20
    assert [each.finished.timings.cached_tokens for each in together] == [0, 99, 99, 99]
    assert len({each.text for each in together}) == 4
    for request, gathered in zip(requests, together, strict=True):
        expected = alone(request)
        assert (gathered.text, gathered.tokens, gathered.logprobs) == (
            expected.text,
            expected.tokens,
            expected.logprobs,
        )
        assert gathered.finished.reason is expected.finished.reason


def test_samples_take_their_first_token_in_the_same_step() -> None:
    backend = noisy(max_sequences=4)
    answer_all(Engine(backend), samples(4, 100, max_tokens=3))
    assert [len(batch.tokens) for batch in backend.batches] == [99, 4, 4, 4]


def test_more_samples_than_sequences_take_turns() -> None:
    backend = noisy(max_sequences=3)
    requests = samples(8, 50)
    together = answer_all(Engine(backend), requests)
    assert rows(backend) == 49 + 8 * 20
    assert [each.tokens for each in together] == [alone(request).tokens for request in requests]


def test_a_common_beginning_is_computed_once() -> None:
    stem = random_prompt(60).tokens
    requests = [endless(Request(TokenPrompt([*stem, *random_prompt(9, seed).tokens]), 5)) for seed in (1, 2, 3)]
    backend = noisy(max_sequences=3)
    together = answer_all(Engine(backend), requests)
    assert rows(backend) == 60 + 3 * (9 + 4)
    assert [each.tokens for each in together] == [alone(request).tokens for request in requests]


def test_a_short_common_beginning_is_not_waited_for() -> None:
    stem = random_prompt(LEAST_SHARED - 1).tokens
    backend = noisy(max_sequences=2)
    answer_all(
        Engine(backend),
        [endless(Request(TokenPrompt([*stem, *random_prompt(9, seed).tokens]), 2)) for seed in (1, 2)],
    )
    assert set(backend.batches[0].seq.tolist()) == {0, 1}


def test_a_request_with_another_beginning_does_not_wait() -> None:
    backend = noisy(max_sequences=3)
    engine = Engine(backend, rows_per_step=64)
    same, other = samples(2, 100), random_request(20, seed=9)
    answer_all(engine, [*same, other])
    assert len(set(backend.batches[1].seq.tolist())) == 2


@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 6])
def test_samples_outlive_the_one_that_computes_their_prompt(after_steps: int) -> None:
    backend = noisy(max_sequences=3)
    engine = Engine(backend, rows_per_step=32)
    requests = samples(3, 100)
    ids = [engine.submit(request) for request in requests]
    events = [event for _ in range(after_steps) for event in engine.step()]
    engine.cancel(ids[0])
    first, *others = run_to_the_end(engine, ids, events=events)
    assert first.finished.reason is FinishReason.CANCELLED
    assert [each.tokens for each in others] == [alone(request).tokens for request in requests[1:]]
    assert_books_agree(engine)
    of_the_prompt = rows(backend) - len(first.tokens) - 2 * 20
    assert of_the_prompt < 99 + LEAST_SHARED, "the others copy what the first one has computed"


def test_a_failing_pass_does_not_leave_samples_waiting() -> None:
    class Failing(ScriptedBackend):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            outputs = super().forward(batch)
            if len(self.batches) == 2:
                raise RuntimeError("a worker died")
            return outputs

    engine = Engine(Failing(None, max_sequences=3), rows_per_step=32)
    requests = samples(3, 100)
    ids = [engine.submit(request) for request in requests]
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    others = run_to_the_end(engine, ids[1:])
    assert [each.tokens for each in others] == [alone(request).tokens for request in requests[1:]]


@pytest.mark.push
@pytest.mark.parametrize("capacity", [70, 100, 180])
@pytest.mark.parametrize("checkpoint", [None, 16])
def test_samples_in_a_cache_that_is_too_small_take_turns(capacity: int, checkpoint: int | None) -> None:
    """The scripted cache counts copied tokens again, so even the prompts of two samples may not fit."""
    backend = ScriptedBackend(None, max_sequences=4, capacity=capacity, checkpoint=checkpoint)
    engine = Engine(backend, rows_per_step=16)
    requests = samples(6, 45)
    together = answer_all(engine, requests)
    assert [each.tokens for each in together] == [alone(request).tokens for request in requests]
    assert_books_agree(engine)
