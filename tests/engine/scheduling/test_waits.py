"""Tests of the predicted times of requests, against a server that runs all steps one by one."""

from __future__ import annotations

import math
import random
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmrun.backends.run_speeds import LearntCosts
from llmrun.engine.costs import MOST_ROWS, StepCosts, StepSize
from llmrun.engine.scheduling.scheduler import ChunkRule
from llmrun.engine.scheduling.waits import AnswerLengths, Load, Simulation, Successors
from tests.support.engine.simulated_server import MACHINES, SimulatedServer, random_job

BUSY = Load(missing=0, depth=100, generated=10, limit=200, blocks=10)
NEW = Load(missing=50, depth=0, generated=0, limit=200, blocks=10)


def known_lengths(*lengths: int, limit: int = 200) -> AnswerLengths:
    known = AnswerLengths()
    for length in lengths:
        known.observe(limit, length)
    return known


def known_costs() -> StepCosts:
    """Return costs with which every step takes 0.1 s."""
    costs = StepCosts()
    for n in range(1, 30):
        costs.observe(StepSize(n, n, 100 * n, 100 * n), 0, 0.1)
        costs.observe(StepSize(n, n + 30, 100 * n, 130 * n), 30, 0.1)
    return costs


def test_drafts_shorten_the_wait() -> None:
    plain, drafted = (wait(NEW, [], [BUSY] * 4, tokens_per_step=tokens) for tokens in (1.0, 3.0))
    assert drafted == pytest.approx(plain / 3, rel=0.05)


def wait(
    new: Load,
    waiting: list[Load],
    running: list[Load],
    *,
    free_slots: int = 0,
    free_blocks: int = 0,
    lengths: AnswerLengths | None = None,
    costs: StepCosts | None = None,
    tokens_per_step: float = 1.0,
) -> float:
    """Return the predicted seconds until a new request is admitted."""
    costs = costs or known_costs()
    simulation = simulated(new, waiting, running, costs, free_slots, free_blocks, lengths, tokens_per_step)
    return simulation.admitted.get(len(running) + len(waiting), math.inf)


def simulated(
    new: Load,
    waiting: list[Load],
    running: list[Load],
    costs: StepCosts,
    free_slots: int = 1,
    free_blocks: int = 10**6,
    lengths: AnswerLengths | None = None,
    tokens_per_step: float = 1.0,
) -> Simulation:
    simulation = Simulation(
        running,
        [*waiting, new],
        free_slots=free_slots,
        free_blocks=free_blocks,
        rule=ChunkRule(costs, MOST_ROWS, by_seconds=True),
        lengths=lengths or known_lengths(*[50] * 20),
        tokens_per_step=tokens_per_step,
    )
    simulation.run([len(running) + len(waiting)])
    return simulation


def first_token(new: Load, waiting: list[Load], running: list[Load], costs: StepCosts, free_slots: int = 1) -> float:
    """Return the predicted seconds until the first token of a new request."""
    simulation = simulated(new, waiting, running, costs, free_slots)
    return simulation.first_tokens[len(running) + len(waiting)]


@pytest.mark.push
@pytest.mark.parametrize(
    ("name", "slots", "blocks", "longest_prompt"),
    [
        ("135M, one thread", 4, 10**6, 200),
        ("135M, one thread", 16, 10**6, 1000),
        ("8B, 8 threads", 16, 10**6, 200),
        ("8B, 8 threads", 8, 10**6, 4000),
        ("compute-bound", 4, 10**6, 1000),
        ("compute-bound", 32, 800, 1000),  # the KV cache is what requests wait for
    ],
)
def test_predictions_agree_with_a_simulated_server(name: str, slots: int, blocks: int, longest_prompt: int) -> None:
    seconds, chance = MACHINES[name], random.Random(slots)
    server = SimulatedServer(seconds, slots=slots, blocks=blocks, seed=1)
    queue = 0  # the length that the queue is kept at
    waits: list[tuple[float, float]] = []  # predicted and true seconds
    first_tokens: list[tuple[float, float]] = []
    for _ in range(10):
        for _ in range(50):  # steps during which the costs learns, and the queue changes
            queue = chance.randint(5, 40) if chance.random() < 0.1 or not queue else queue
            while len(server.waiting) < queue:
                server.waiting.append(random_job(chance, longest_prompt=longest_prompt))
            server.step()
        job = random_job(chance, longest_prompt=longest_prompt)
        predicted, asked_at = server.predicted(job), server.now
        assert predicted.first_token_s is not None
        server.waiting.append(job)
        while job.began is None or job.first_token is None:
            server.step()
        waits.append((predicted.wait_s, job.began - asked_at))
        first_tokens.append((predicted.first_token_s, job.first_token - asked_at))
    for asked in (waits, first_tokens):
        assert statistics.median(abs(predicted - true) / true for predicted, true in asked[2:]) < 0.25


def test_a_request_that_fits_starts_at_once() -> None:
    assert wait(NEW, [], [], free_slots=1, free_blocks=10) == 0
    assert wait(NEW, [], [BUSY] * 3, free_slots=1, free_blocks=10) == 0


def test_a_request_waits_for_a_slot() -> None:
    assert wait(NEW, [], [BUSY], free_blocks=100) == pytest.approx(40 * 0.1, rel=0.2)


def test_a_request_waits_for_blocks() -> None:
    large = Load(missing=50, depth=0, generated=0, limit=200, blocks=25)
    assert wait(large, [], [BUSY, BUSY], free_slots=5, free_blocks=5) == pytest.approx(40 * 0.1, rel=0.2)


def test_a_request_that_can_never_run_waits_forever() -> None:
    assert wait(Load(50, 0, 0, 200, blocks=31), [], [BUSY, BUSY], free_blocks=10) == math.inf
    assert wait(NEW, [Load(50, 0, 0, 200, blocks=31)], [BUSY, BUSY], free_blocks=10) == math.inf


def test_each_waiting_request_makes_the_wait_longer() -> None:
    waits = [wait(NEW, [NEW] * n, [BUSY] * 2, free_blocks=100) for n in range(0, 20, 4)]
    assert waits == sorted(waits)
    assert waits[-1] > 5 * waits[0]


def test_the_first_of_many_answers_ends_early() -> None:
    """With lengths from 1 to 100, the first of 32 answers ends after a few tokens, not after 50."""
    lengths = known_lengths(*range(1, 101))
    just_begun = Load(missing=0, depth=100, generated=0, limit=200, blocks=10)
    assert wait(NEW, [], [just_begun] * 32, free_blocks=100, lengths=lengths) < 10 * 0.1


def test_a_long_prompt_in_progress_delays_a_short_one_by_nothing() -> None:
    long = Load(missing=30_000, depth=0, generated=0, limit=200, blocks=10)
    assert wait(NEW, [], [long], free_slots=1, free_blocks=10) == 0


def test_prompts_share_the_rows_of_each_step() -> None:
    """However they share them, they take as long as one prompt of their length and average depth."""
    new = Load(missing=50, depth=0, generated=0, limit=1, blocks=50)
    shared = wait(new, [], [Load(2000, 20_000, 0, 1, 10)] * 5)
    alone = wait(new, [], [Load(10_000, 16_000, 0, 1, 50)])
    assert shared == pytest.approx(alone, rel=0.06)


def test_deep_prompts_take_longer() -> None:
    seconds, costs = MACHINES["135M, one thread"], StepCosts()
    for depth in [*range(0, 20_000, 200)] * 2:
        size = StepSize(1, 100, depth, 100 * depth)
        costs.observe(size, 100, seconds(size))
    shallow, deep = (
        wait(Load(1, 0, 0, 1, 10), [], [Load(1000, depth, 0, 1, 10)], costs=costs) for depth in (0, 19_000)
    )
    assert shallow < 0.45 * deep


def test_a_prediction_needs_no_observation() -> None:
    loads = [Load(1000, 0, 0, 4096, 40)] * 5
    found = wait(NEW, loads, [BUSY] * 4, free_blocks=1000, costs=StepCosts(), lengths=AnswerLengths())
    assert 0 < found < math.inf


def test_many_short_requests_wait_for_one_slot() -> None:
    """Simulating the steps of short requests together must not make these steps longer."""
    waiting = [Load(missing=50, depth=0, generated=0, limit=1, blocks=1)] * 1000
    assert wait(NEW, waiting, [], free_slots=1, free_blocks=100) == pytest.approx(1000 * 0.2, rel=0.1)


def test_encoding_delays_only_requests_with_images() -> None:
    image = replace(NEW, images={"": 30.0})
    assert first_token(NEW, [], [image, BUSY], known_costs()) < 2
    assert first_token(image, [], [BUSY], known_costs()) == pytest.approx(30, abs=2)
    assert first_token(image, [], [], known_costs()) == pytest.approx(30, abs=2)
    assert first_token(replace(NEW, images={"": 1.0}), [], [BUSY], known_costs()) == pytest.approx(1.2, abs=0.2)
    assert wait(NEW, [], [image], lengths=known_lengths(1)) == pytest.approx(30, abs=2)


def test_images_are_encoded_one_after_the_other() -> None:
    new, waiting, running = (replace(NEW, images={key: 10.0}) for key in "abc")
    assert first_token(new, [waiting], [BUSY, running], known_costs(), free_slots=2) == pytest.approx(30, abs=2)


def test_a_shared_image_is_encoded_once() -> None:
    waiting, running = (replace(NEW, images=images) for images in ({"a": 10.0}, {"b": 20.0, "a": 10.0}))
    for images, expected in (({"a": 10.0}, 30), ({"b": 20.0}, 20), ({"b": 20.0, "c": 5.0}, 35)):
        new = replace(NEW, images=images)
        found = first_token(new, [waiting] * 3, [BUSY, running], known_costs(), free_slots=4)
        assert found == pytest.approx(expected, abs=2)


def test_a_prediction_takes_milliseconds() -> None:
    """A prediction takes 7 ms of CPU time on a busy machine."""
    chance = random.Random(1)
    running = [Load(0, chance.randint(10, 2000), chance.randint(1, 50), 512, 80) for _ in range(32)]
    waiting = [Load(chance.randint(10, 2000), 0, 0, 512, 80) for _ in range(256)]
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        assert wait(NEW, waiting, running, free_blocks=10_000) > 0
        taken.append(time.perf_counter() - started)
    assert min(taken) < 0.1


def test_successors_do_not_hold_up_a_simulation_for_long() -> None:
    """Without a limit on followed requests, thousands of short successors run before each of the long prompts."""
    chance = random.Random(1)
    running = [
        Load(chance.choice((0, 19_000)), chance.randint(100, 5000), 10, 500, 20, computed=100) for _ in range(64)
    ]
    costs = StepCosts()
    costs.assume(LearntCosts((0.06, 0.008, 4e-4, 2e-5), (0.06, 0.004, 1e-3, 1e-4), 256, 1 << 21, 8))
    rule, prompts = (
        ChunkRule(costs, MOST_ROWS, by_seconds=True),
        [at for at, load in enumerate(running) if load.missing],
    )
    simulation = Simulation(
        running,
        [NEW],
        free_slots=0,
        free_blocks=0,
        rule=rule,
        lengths=AnswerLengths(),
        tokens_per_step=1.0,
        successors=Successors(),
    )
    began = time.thread_time()
    simulation.run(prompts)
    assert time.thread_time() - began < 0.5
    assert simulation.first_tokens.keys() >= {*prompts}


def test_lengths_are_learnt_for_each_order_of_magnitude() -> None:
    lengths = known_lengths(*[5] * 10, limit=10)
    for _ in range(10):
        lengths.observe(1000, 300)
    assert lengths.remaining(12, 0, 0.5) == 5
    assert lengths.remaining(1000, 0, 0.5) == 300
    assert lengths.remaining(100, 0, 0.9) == 100  # of an unknown class: the assumed length, up to the limit


def test_old_lengths_are_forgotten() -> None:
    lengths = known_lengths(*[10] * 500)
    for _ in range(150):
        lengths.observe(200, 90)
    assert {lengths.remaining(200, 0, quantile) for quantile in (0.0, 0.5, 0.99)} == {90}


def test_an_answer_that_is_longer_than_all_known_ones_goes_on() -> None:
    assert known_lengths(*[10] * 10).remaining(200, 60, 0.5) == 60


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 4096)), max_size=30),
    st.integers(1, 4096),
    st.integers(0, 4096),
    st.floats(0, 1, exclude_max=True),
)
def test_remaining_tokens_stay_within_the_limit(
    known: list[tuple[int, int]], limit: int, generated: int, quantile: float
) -> None:
    lengths = AnswerLengths()
    for its_limit, length in known:
        lengths.observe(its_limit, min(length, its_limit))
    assert 1 <= lengths.remaining(limit, generated, quantile) <= max(limit - generated, 1)
