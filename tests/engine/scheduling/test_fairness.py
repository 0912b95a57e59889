"""Tests of the order of admission and of the order of prompts, most of them with random requests."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.scheduling.fairness import LONGEST_HEAD_START, TURNS, FairShares, prompt_order

ROW_SECONDS = 0.001
LARGEST = 500  # tokens of a random request: 400 of its prompt and 100 of its answer


@dataclass(eq=False)
class Request:
    tenant: str
    prompt_tokens: int
    submitted: float
    answer: int = 0


@dataclass(eq=False)
class RunningPrompt:
    missing: int
    last_step: int


@dataclass
class Server:
    """A server with some slots, which runs a token of each answer in each second and prompts at once."""

    slots: int
    shares: FairShares = field(default_factory=FairShares)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)  # tokens of each tenant
    now: float = 0.0

    def step(self) -> None:
        self.now += 1.0
        for request in self.shares.order(self.waiting, self.now, ROW_SECONDS)[: self.slots - len(self.running)]:
            self.waiting.remove(request)
            self.running.append(request)
            self.admitted.append(request)
            self.shares.admit(request.tenant, request.prompt_tokens)
            self.used[request.tenant] += request.prompt_tokens
        for request in list(self.running):
            request.answer -= 1
            self.shares.charge(request.tenant, 1)
            self.used[request.tenant] += 1
            if request.answer <= 0:
                self.running.remove(request)


def keep_busy(server: Server, chance: random.Random, kinds: dict[str, tuple[int, int]]) -> None:
    """Give each tenant four waiting requests, with prompts and answers up to the given lengths."""
    for tenant, (prompt, answer) in kinds.items():
        while sum(request.tenant == tenant for request in server.waiting) < 4:
            lengths = chance.randint(1, prompt), chance.randint(1, answer)
            server.waiting.append(Request(tenant, lengths[0], server.now + 0.5, lengths[1]))


KINDS = st.tuples(st.sampled_from([5, 50, 400]), st.sampled_from([1, 10, 100]))
SEEDS = st.integers(0, 999).map(random.Random)


@pytest.mark.push
@given(st.lists(KINDS, min_size=2, max_size=5), st.integers(1, 4), SEEDS)
def test_busy_tenants_use_equal_numbers_of_tokens(
    kinds: list[tuple[int, int]], slots: int, chance: random.Random
) -> None:
    """No tenant starves, whatever the requests of the others are like."""
    server = Server(slots)
    for _ in range(150):
        keep_busy(server, chance, {str(index): kind for index, kind in enumerate(kinds)})
        server.step()
        used = [server.used[str(index)] for index in range(len(kinds))]
        assert max(used) - min(used) <= slots * LARGEST


def test_many_requests_of_one_tenant_delay_another_by_one() -> None:
    shares = FairShares()
    crowd = [Request("crowd", 10, float(i)) for i in range(100)]
    late = Request("late", 10, 200.0)
    assert shares.order([*crowd, late], 200.0, ROW_SECONDS).index(late) <= 1


@pytest.mark.push
@given(st.integers(1, 4), st.integers(50, 300), SEEDS)
def test_an_idle_tenant_saves_nothing(slots: int, steps: int, chance: random.Random) -> None:
    """After a pause, it gets at most as much ahead as the requests of the other tenant that were in progress."""
    server = Server(slots)
    for _ in range(steps):
        keep_busy(server, chance, {"busy": (400, 100)})
        server.step()
    before = server.used["busy"]
    for _ in range(300):
        keep_busy(server, chance, {"busy": (400, 100), "idle": (400, 100)})
        server.step()
        assert abs(server.used["busy"] - before - server.used["idle"]) <= 2 * slots * LARGEST


def test_a_tenant_with_few_requests_saves_nothing() -> None:
    """Its requests never wait, and neither do those of the other tenant, which uses much more."""
    server = Server(slots=4)
    for _ in range(200):
        server.waiting = [Request("few", 1, server.now + 0.5, 1), Request("many", 400, server.now + 0.5, 1)]
        server.step()
    chance, before = random.Random(1), Counter(server.used)
    for _ in range(100):
        keep_busy(server, chance, {"few": (400, 1), "many": (400, 1)})
        server.step()
    assert server.used["few"] - before["few"] <= server.used["many"] - before["many"] + 4 * LARGEST


def test_tokens_of_the_recent_past_are_remembered() -> None:
    shares = FairShares()
    both = [Request("one", 10, 0.0), Request("other", 10, 0.0)]
    shares.order(both, 0.0, ROW_SECONDS)
    shares.admit("one", 10)
    shares.charge("one", 50)
    rest = [Request("one", 10, 0.0), both[1]]
    assert shares.order(rest, 1.0, ROW_SECONDS)[0].tenant == "other"
    shares.charge("one", -60)
    assert shares.order(rest, 2.0, ROW_SECONDS)[0].tenant == "one"


def test_tenants_that_are_gone_are_forgotten() -> None:
    server = Server(slots=1)
    for i in range(1000):
        server.waiting.append(Request(f"tenant {i}", 10, server.now + 0.5, 5))
        for _ in range(5):
            server.step()
    assert len(server.shares._used) < 10


@given(st.lists(st.tuples(st.integers(1, 30_000), st.integers(0, 60)), max_size=30))
def test_overtaking_is_bounded(requests: list[tuple[int, int]]) -> None:
    """Only older requests, and shorter ones that are at most LONGEST_HEAD_START younger, go first."""
    waiting = [Request("only", missing, submitted) for missing, submitted in requests]
    order = FairShares().order(waiting, 60.0, ROW_SECONDS)
    assert sorted(map(id, order)) == sorted(map(id, waiting))
    for index, second in enumerate(order):
        for first in order[:index]:
            later = first.submitted - second.submitted
            assert later <= 0 or (first.prompt_tokens < second.prompt_tokens and later <= LONGEST_HEAD_START)


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 5000))
def test_equal_requests_are_first_come_first_served(times: list[int], missing: int) -> None:
    order = FairShares().order([Request("only", missing, at) for at in times], 1000.0, ROW_SECONDS)
    assert [request.submitted for request in order] == sorted(times)


def test_a_long_prompt_is_admitted_beside_a_stream_of_short_ones() -> None:
    server = Server(slots=1)
    long = Request("only", 30_000, 0.0, 1)
    server.waiting.append(long)
    while long not in server.admitted:
        server.waiting += [Request("only", 10, server.now + 0.5, 1) for _ in range(2)]
        server.step()
    assert server.now <= 2 * LONGEST_HEAD_START + 2


@pytest.mark.parametrize("step", range(2 * TURNS))
def test_the_shortest_prompt_goes_first(step: int) -> None:
    prompts = [(500, 2), (20, 3), (90, 1)]
    first = 90 if step % TURNS == 0 else 20
    assert prompts[prompt_order(prompts, step)[0]][0] == first


@given(st.integers(1, 8), st.integers(0, 10), SEEDS)
def test_every_prompt_runs_within_its_bound(k: int, first_step: int, chance: random.Random) -> None:
    """Only the first prompt of each step runs, and each one that ends is replaced by one that is likely to be short."""
    prompts = [RunningPrompt(chance.randint(1, 1000), first_step) for _ in range(k)]
    for step in range(first_step, first_step + 40 * k):
        order = prompt_order([(prompt.missing, prompt.last_step) for prompt in prompts], step)
        assert sorted(order) == list(range(k))
        prompts[order[0]].missing -= 10
        prompts[order[0]].last_step = step
        assert all(step - prompt.last_step < k * TURNS for prompt in prompts)
        prompts = [prompt for prompt in prompts if prompt.missing > 0]
        prompts += [RunningPrompt(chance.choice([1, 15, 1000]), step) for _ in range(k - len(prompts))]
