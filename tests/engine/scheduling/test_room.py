"""Tests of the room that requests need to finish, and of the engine in a cache that is too small for all of them."""

from __future__ import annotations

import random
from itertools import count, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.backends.base import Backend, OpenOptions
from llmrun.backends.registry import open_backend
from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.types import FinishReason
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request, TokenPrompt
from llmrun.engine.scheduling.scheduler import Claim, all_can_finish
from tests.support.engine.scripted_models import endless, random_prompt
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.tiers import examples

CLAIMS = st.lists(st.builds(Claim, needed=st.integers(0, 9), held=st.integers(0, 9)), max_size=5)


def finishes_in_order(free: int, claims: tuple[Claim, ...]) -> bool:
    """Return whether each request finds its blocks when its turn comes, and gives all of them back."""
    for claim in claims:
        if claim.needed > free:
            return False
        free = free - claim.needed + (claim.needed + claim.held)
    return True


@given(free=st.integers(0, 12), claims=CLAIMS)
def test_the_order_of_needs_is_as_good_as_any(free: int, claims: list[Claim]) -> None:
    assert all_can_finish(free, claims) == any(finishes_in_order(free, order) for order in permutations(claims))


def crowd(rng: random.Random, count: int, context: int) -> list[Request]:
    """Return requests of random lengths, some of which begin alike and some of which name no limit."""
    requests = []
    for seed in range(count):
        stem = [*random_prompt(rng.randrange(context // 2), rng.randrange(3)).tokens]
        own = [*random_prompt(rng.randrange(1, context // 3), seed).tokens]
        limit = None if rng.random() < 0.1 else rng.randrange(1, context // 3)
        requests.append(endless(Request(TokenPrompt([*stem, *own]), limit)))
    return requests


def run(engine: Engine, requests: list[Request], rng: random.Random) -> tuple[dict[int, list[int]], int]:
    """Submit requests at random times. Returns the tokens by request and the largest number that ran together."""
    left, tokens, most = list(enumerate(requests)), dict[int, list[int]](), 0
    numbers: dict[int, int] = {}
    while left or not engine.idle:
        while left and rng.random() < 0.5:
            number, request = left.pop(0)
            numbers[engine.submit(request)] = number
        for event in engine.step():
            if isinstance(event, Finished):
                assert event.reason in (FinishReason.LENGTH, FinishReason.STOP)
            tokens.setdefault(numbers[event.request_id], []).extend(getattr(event, "tokens", ()))
        most = max(most, len(engine._requests.running))
    return tokens, most


def check_crowd(backend: Backend, solitary: Backend, *, count: int, context: int, seed: int) -> int:
    """Run random requests, and compare a few of them with those run alone. Returns how many ran at the same time."""
    rng = random.Random(seed)
    requests = crowd(rng, count, context)
    engine = Engine(backend, rows_per_step=48)
    tokens, most = run(engine, requests, rng)
    assert engine.status().preemptions == 0
    assert len(tokens) == count
    for number in rng.sample(range(count), 4):
        alone, _ = run(Engine(solitary), [requests[number]], rng)
        assert alone[0] == tokens[number]
    return most


@pytest.mark.push
@pytest.mark.parametrize("seed", range(4))
def test_nobody_fails_or_starts_again_in_a_quarter_of_the_cache(seed: int) -> None:
    context = 128
    backend = ScriptedBackend(None, max_sequences=16, context_size=context, capacity=4 * context)
    solitary = ScriptedBackend(None, context_size=context)
    assert check_crowd(backend, solitary, count=60, context=context, seed=seed) > 5


@pytest.mark.night
def test_nobody_starts_again_in_a_quarter_of_a_paged_cache(tmp_path: Path) -> None:
    path, context = tiny_llama(tmp_path / "tiny.gguf", context=512), 512
    options = OpenOptions(backend="cpu", context_size=context, threads=1)
    solitary = open_backend(path, options)
    crowded = open_backend(
        path,
        OpenOptions("cpu", context_size=context, max_sequences=8, kv_tokens=2 * context, cached_prefixes=8, threads=1),
    )
    try:
        assert check_crowd(crowded, solitary, count=80, context=context, seed=1) > 4
    finally:
        crowded.close()
        solitary.close()


@pytest.mark.push
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 32), sequences=st.integers(2, 5))
def test_any_crowd_gets_through_the_smallest_cache(seed: int, sequences: int) -> None:
    """The cache holds a single context, and requests are cancelled at random."""
    rng = random.Random(seed)
    backend = ScriptedBackend(None, max_sequences=sequences, context_size=64, capacity=64)
    engine = Engine(backend, rows_per_step=16)
    ids = [engine.submit(request) for request in crowd(rng, 12, 64)]
    ended = set()
    for _ in range(3000):
        if rng.random() < 0.02:
            engine.cancel(rng.choice(ids))
        ended |= {event.request_id for event in engine.step() if isinstance(event, Finished)}
        if engine.idle:
            break
    assert ended == set(ids)
    assert engine.status().preemptions == 0


@pytest.mark.push
def test_overcommitted_requests_start_again_with_the_same_answers() -> None:
    backend = ScriptedBackend(None, max_sequences=4, context_size=64, capacity=96)
    rng = random.Random(5)
    requests = [endless(Request(random_prompt(20, seed), 40)) for seed in range(8)]
    engine = Engine(backend, overcommit=True)
    tokens, _ = run(engine, requests, rng)
    assert engine.status().preemptions > 0
    for number, request in enumerate(requests):
        alone, _ = run(Engine(ScriptedBackend(None, context_size=64)), [request], rng)
        assert alone[0] == tokens[number]


def test_paused_answers_do_not_keep_out_short_ones() -> None:
    """Four answers without a limit wait for each other's memory, but there is room for a short one."""
    backend = ScriptedBackend(None, max_sequences=8, context_size=256, capacity=256)
    engine = Engine(backend, max_running=4)
    for seed in range(4):
        engine.submit(endless(Request(random_prompt(10, seed))))
    for _ in range(20):
        engine.step()
    short = engine.submit(endless(Request(random_prompt(5, 9), 5)))
    ended = [event.request_id for _ in range(30) for event in engine.step() if isinstance(event, Finished)]
    assert ended == [short]


def test_later_requests_do_not_hold_up_a_long_prompt() -> None:
    """There are always short ones, and together they leave too little room for the long prompt's next chunk."""
    backend = ScriptedBackend(None, max_sequences=8, context_size=256, capacity=256)
    engine = Engine(backend)

    def submit_short() -> None:
        engine.submit(endless(Request(random_prompt(30, next(seeds)), 20 + next(seeds) % 20)))

    seeds = count()
    for _ in range(8):
        submit_short()
    engine.step()
    long = engine.submit(endless(Request(random_prompt(150, 99), 5)))
    n_ended = 0
    while n_ended < 1000:
        ended = [event.request_id for event in engine.step() if isinstance(event, Finished)]
        if long in ended:
            break
        n_ended += len(ended)
        for _ in ended:
            submit_short()
    assert n_ended < 25


@pytest.mark.parametrize(("share", "expected"), [(False, [0, 0, 99]), (True, [0, 99, 99])])
def test_tenants_share_prefixes_only_if_asked(share: bool, expected: list[int]) -> None:
    backend = ScriptedBackend(None, max_sequences=4)
    engine = Engine(backend, share_prefixes=share)
    prompt = random_prompt(100)
    ids = [engine.submit(Request(prompt, 3, tenant=tenant)) for tenant in ("a", "b", "a")]
    cached: dict[int, int] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Finished):
                cached[event.request_id] = event.timings.cached_tokens
    assert [cached[each] for each in ids] == expected


def test_a_suspect_runs_its_first_step_alone() -> None:
    backend = ScriptedBackend(None, max_sequences=4)
    begun: list[list[int]] = []
    engine = Engine(backend, on_begin=lambda ids: begun.append(list(ids)))
    first = engine.submit(endless(Request(random_prompt(10), 20)))
    engine.step()
    suspect = engine.enqueue(engine.prepare(endless(Request(random_prompt(30, 1), 20))), alone=True)
    engine.step()
    assert begun == [[first], [suspect]]
    assert len(set(backend.batches[-1].seq.tolist())) == 1
    engine.step()
    assert len(set(backend.batches[-1].seq.tolist())) == 2
