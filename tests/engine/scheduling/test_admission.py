"""Tests of the queue: requests that run alone, several threads, and the counts of tokens."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.engine.answer import Answer
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request
from tests.support.engine.scripted_models import endless, random_prompt


def test_a_suspect_without_room_lets_others_finish() -> None:
    """Its first chunk would take the room that the other request needs, so it waits for its end."""
    backend = ScriptedBackend(None, max_sequences=2, context_size=64, capacity=80)
    begun: list[list[int]] = []
    engine = Engine(backend, on_begin=lambda ids: begun.append(list(ids)))
    first = engine.submit(endless(Request(random_prompt(20), 30)))
    engine.step()
    suspect = engine.enqueue(engine.prepare(endless(Request(random_prompt(40, 1), 23))), alone=True)
    ended = []
    while not engine.idle:
        ended += [event.request_id for event in engine.step() if isinstance(event, Finished)]
    assert ended == [first, suspect]
    assert begun == [[first], [suspect], [suspect]]  # the cache is full until the prefix of the first one is dropped
    assert engine.status().preemptions == 0


@pytest.mark.parametrize("trouble", ["a full cache", "a cancelled pass"])
def test_a_suspect_whose_first_step_fails_runs_alone_again(trouble: str) -> None:
    backend = ScriptedBackend(None, max_sequences=4, context_size=64, capacity=64)
    begun: list[list[int]] = []
    engine = Engine(backend, on_begin=lambda ids: begun.append(list(ids)))
    if trouble == "a full cache":  # with a prefix that must be dropped first
        engine.submit(endless(Request(random_prompt(50, 2), 3)))
        while not engine.idle:
            engine.step()
    first = engine.submit(endless(Request(random_prompt(4), 20)))
    engine.step()
    suspect = engine.enqueue(engine.prepare(endless(Request(random_prompt(20, 1), 5))), alone=True)
    if trouble == "a cancelled pass":
        backend.cancel()
    del begun[:]
    n_steps = len(backend.batches)
    while len(backend.batches) == n_steps:
        engine.step()
    assert begun == [[suspect], [suspect]]
    assert first not in begun[-1]
    assert len(set(backend.batches[-1].seq.tolist())) == 1


def test_several_suspects_begin_one_by_one() -> None:
    backend = ScriptedBackend(None, max_sequences=4)
    engine = Engine(backend)
    for seed in range(3):
        engine.enqueue(engine.prepare(endless(Request(random_prompt(20, seed), 5))), alone=True)
    for _ in range(4):
        engine.step()
    assert [len(set(batch.seq.tolist())) for batch in backend.batches] == [1, 1, 1, 3]


def test_the_count_of_generated_tokens_never_falls() -> None:
    """Requests that return to the queue, and those that are cancelled there, keep their tokens."""
    backend = ScriptedBackend(None, max_sequences=4, context_size=64, capacity=96)
    engine = Engine(backend, overcommit=True)
    ids = [engine.submit(endless(Request(random_prompt(20, seed), 40))) for seed in range(8)]
    rng, before = random.Random(1), 0
    while not engine.idle:
        if rng.random() < 0.1:
            engine.cancel(rng.choice(ids))
        engine.step()
        status = engine.status()
        assert status.generated_tokens >= before
        before = status.generated_tokens
    assert status.preemptions > 0


def test_predicted_waits_ignore_cancelled_requests() -> None:
    """Otherwise, a client that repeats a cancelled request could be refused because of --max-wait."""
    engine = Engine(ScriptedBackend(None, max_sequences=1, context_size=64, step_seconds=0.001))
    running, waiting = (engine.submit(endless(Request(random_prompt(20, seed), 40))) for seed in range(2))
    for _ in range(3):
        engine.step()
    new = engine.prepare(endless(Request(random_prompt(20, 2), 40)))
    behind_both = engine.predicted(new).wait_s
    engine.cancel(waiting)
    behind_one = engine.predicted(new).wait_s
    engine.cancel(running)
    assert engine.predicted(new).wait_s == 0.0 < behind_one < behind_both


def test_the_rest_of_a_cancelled_prompt_is_not_charged() -> None:
    """Otherwise, a client that repeats a cancelled request would wait for more requests of other tenants."""
    begun: list[int] = []
    engine = Engine(ScriptedBackend(None, max_sequences=1), rows_per_step=16, on_begin=begun.extend)
    old = engine.prepare(Request(random_prompt(200), 1, tenant="impatient"))
    old.submitted -= 100.0  # the old request is the first one even if short prompts go first
    cancelled = engine.enqueue(old)
    others = [engine.submit(Request(random_prompt(100, seed), 1, tenant="other")) for seed in (1, 2)]
    for _ in range(2):
        engine.step()
    engine.cancel(cancelled)
    repeated = engine.submit(Request(random_prompt(200), 1, tenant="impatient"))
    while not engine.idle:
        engine.step()
    assert begun[0] == cancelled
    assert begun[1] in others
    assert begun[2] == repeated


@pytest.mark.night
def test_other_threads_may_queue_requests_during_steps() -> None:
    backend = ScriptedBackend(None, max_sequences=2, context_size=64)
    engine = Engine(backend, rows_per_step=8)
    answers = [engine.prepare(endless(Request(random_prompt(3, seed), 1))) for seed in range(1200)]
    errors: list[BaseException] = []

    def queue(some: Sequence[Answer], *, predict: bool) -> None:
        try:
            for answer in some:
                if predict:
                    engine.predicted(answer)
                engine.enqueue(answer)
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            errors.append(error)

    for answer in answers[:400]:  # a long queue takes long to look through
        engine.enqueue(answer)
    threads = [
        threading.Thread(target=queue, args=(answers[400:1000],), kwargs={"predict": False}),
        threading.Thread(target=queue, args=(answers[1000:],), kwargs={"predict": True}),
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            engine.step()
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    for answer in answers:
        engine.cancel(answer.request_id)
    engine.step()
    assert not errors
    assert engine.idle
