"""Tests of running a workload once on an engine: every request is answered, as often and as far as asked."""

from __future__ import annotations

import time

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import Cancelled, ContextExceeded, LlmrunError
from llmrun.engine.drafting.lookup import LookupDrafter, LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.jobs.bench.documents.document import WorkloadFacts
from llmrun.jobs.bench.measuring.asking import LocalAsker, RemoteAsker, measured
from llmrun.jobs.bench.measuring.workload import Turn, Workload, chats, synthetic


def engine_of(max_sequences: int = 1, **options: float) -> tuple[Engine, ScriptedBackend]:
    backend = ScriptedBackend(max_sequences=max_sequences, **options)  # type: ignore[arg-type]
    return Engine(backend), backend


def test_a_synthetic_answer_has_the_length_that_was_asked_for() -> None:
    engine, _ = engine_of()
    sample = LocalAsker(engine).run(synthetic(40, 12, 0, 1), seed=1)
    (request,) = sample.requests
    assert (request.prompt_tokens, request.cached_tokens, request.generated_tokens) == (40, 0, 12)
    assert len(request.gaps_s) == 11
    assert sample.seconds >= request.total_s


def test_every_repetition_has_fresh_tokens_and_equal_seeds_equal_ones() -> None:
    engine, backend = engine_of()
    asker = LocalAsker(engine)
    for seed in (1, 2, 1):
        asker.run(synthetic(16, 1, 0, 1), seed)
    first, second, third = (batch.tokens.tolist() for batch in backend.batches)
    assert first == third != second
    ends = engine.tokenizer.end_of_generation
    assert not ends & set(first + second)


def test_tokens_before_the_prompt_are_in_the_cache_and_not_on_the_clock() -> None:
    engine, _ = engine_of(max_sequences=2)
    sample = LocalAsker(engine).run(synthetic(10, 4, 100, 2), seed=3)
    assert [(r.prompt_tokens, r.cached_tokens, r.generated_tokens) for r in sample.requests] == [(110, 100, 4)] * 2


def test_nothing_is_left_over_from_the_repetition_before() -> None:
    engine, _ = engine_of()
    asker = LocalAsker(engine)
    for _ in range(2):
        sample = asker.run(synthetic(30, 2, 0, 1), seed=7)
        assert sample.requests[0].cached_tokens == 0


@pytest.mark.push
def test_the_turns_of_a_conversation_follow_one_another_and_find_what_was_said() -> None:
    engine, _ = engine_of(context_size=20_000)
    four_turns = chats(1)[2]
    sample = LocalAsker(engine).run(four_turns, seed=1)
    cached = [request.cached_tokens for request in sample.requests]
    assert len(cached) == 4
    assert cached[0] == 0
    assert cached == sorted(cached)
    assert cached[1] > 0


def prompts(*texts: str, temperature: float = 0.0) -> Workload:
    """Return a workload of prompts as from a file."""
    turns = [Turn(({"role": "user", "content": text},), 24, temperature) for text in texts]
    return Workload(WorkloadFacts("prompts", "some"), tuple((turn,) for turn in turns))


def test_every_prompt_begins_from_a_forgotten_state() -> None:
    """Otherwise, speculation would copy repeated answers from memory, and the cache would hold repeated prompts."""
    backend = ScriptedBackend()
    source = Remembering()
    asker = LocalAsker(Engine(backend, drafts=[source]))
    for _ in range(2):
        sample = asker.run(prompts("one", "one", "two"), seed=1)
        assert [request.cached_tokens for request in sample.requests] == [0, 0, 0]
    assert source.remembered_at_start == [0] * 6


class Remembering(LookupSource):
    """Records how many tokens of earlier answers each new answer could be copied from."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered_at_start: list[int] = []

    def drafter(self, request: Request) -> LookupDrafter:
        self.remembered_at_start.append(len(self.remembered.tokens))
        return super().drafter(request)


@pytest.mark.push
def test_equal_answers_have_equal_digests_however_they_arrive() -> None:
    plain = LocalAsker(Engine(ScriptedBackend(step_seconds=0.002)))
    drafting = LocalAsker(Engine(ScriptedBackend(step_seconds=0.002), drafts=[LookupSource()]))
    workload = prompts("a b a b a b a b", "c", temperature=0.8)
    without, with_drafts = (asker.run(workload, seed) for seed, asker in enumerate((plain, drafting)))
    assert with_drafts.requests[0].accepted_tokens > 0
    assert len(set(without.answers)) == 2
    assert without.answers == with_drafts.answers


def test_a_prompt_is_answered_at_its_own_temperature() -> None:
    engine = Listening()
    with pytest.raises(LlmrunError, match="heard"):
        RemoteAsker(engine).run(prompts("x", temperature=0.8), 1)  # type: ignore[arg-type]
    assert engine.asked[0].sampling.temperature == 0.8


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_no_request_is_lost_whatever_runs_at_once(concurrency: int) -> None:
    engine, _ = engine_of(max_sequences=concurrency, context_size=200)
    sample = LocalAsker(engine).run(synthetic(20, 5, 0, concurrency), seed=1)
    assert [request.generated_tokens for request in sample.requests] == [5] * concurrency


def test_no_more_run_at_once_than_was_asked_for() -> None:
    engine, backend = engine_of(max_sequences=8, context_size=200)
    sessions = [[Request(TokenPrompt([65 + number] * 4), 3)] for number in range(9)]
    measured(engine, sessions, 2)
    assert max(len(set(batch.seq.tolist())) for batch in backend.batches) == 2


def test_a_request_that_fails_fails_the_workload() -> None:
    engine, _ = engine_of(context_size=32)
    with pytest.raises(ContextExceeded):
        LocalAsker(engine).run(synthetic(64, 4, 0, 1), seed=1)


def test_an_empty_answer_is_no_measurement() -> None:
    engine, _ = engine_of()

    class Cancelling:
        idle = False

        def submit(self, request: Request) -> int:
            number = engine.submit(request)
            engine.cancel(number)
            return number

        def step(self) -> object:
            return engine.step()

    with pytest.raises(LlmrunError, match="an answer had no tokens"):
        measured(Cancelling(), [[Request(TokenPrompt([65]), 3)]], 1)  # type: ignore[arg-type]


@pytest.mark.push
@pytest.mark.parametrize("workload", [synthetic(2000, 500, 0, 2), synthetic(4, 500, 2000, 1)])
def test_a_run_whose_time_is_over_is_cancelled(workload: Workload) -> None:
    """It is cancelled after a step, in the middle of a prompt or an answer, and the engine can then run again."""
    engine, _ = engine_of(max_sequences=2, step_seconds=0.02, context_size=4096)
    asker = LocalAsker(engine)
    started = time.perf_counter()
    with pytest.raises(Cancelled):
        asker.run(workload, 1, 0.1)
    assert time.perf_counter() - started < 2
    assert engine.idle
    assert asker.run(synthetic(8, 3, 0, 1), 2, 60).generated == 3


class Listening:
    """An engine that records its requests and answers nothing."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def submit(self, request: Request) -> int:
        self.asked.append(request)
        raise LlmrunError("heard")


@pytest.mark.parametrize("workload", [synthetic(8, 4, 0, 1), chats(1)[0]])
def test_a_server_is_told_all_sampling_so_that_servers_can_be_compared(workload: Workload) -> None:
    engine = Listening()
    with pytest.raises(LlmrunError, match="heard"):
        RemoteAsker(engine).run(workload, 1)  # type: ignore[arg-type]
    (request,) = engine.asked
    assert (request.sampling.temperature, request.sends("temperature"), request.sends("repeat_penalty")) == (
        0,
        True,
        True,
    )
    assert request.max_tokens is not None
