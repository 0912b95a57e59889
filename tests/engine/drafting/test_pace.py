"""Tests of draft lengths, in a deterministic simulation: scripted durations and scripted acceptance, no clock.

The simulation has noise, with the same random numbers in each run.
"""

from __future__ import annotations

import statistics

import pytest

from llmrun.engine.costs import StepCosts, StepSize
from llmrun.engine.drafting.base import ANY, Draft, Drafter, Kind
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.drafting.pace import AnswerPace, StepPlan
from tests.support.engine.simulated_steps import MACHINES, Phase, Simulation, size_with_draft

ASSUMED = LookupSource().expected.__getitem__
NOISE = 0.1
SEEDS = range(4)
ANSWERS = 3
TOKENS = 160
CHEAP_ROWS = [name for name in MACHINES if name != "no gain"]


def kind(match_length: int) -> Kind:
    return "lookup", match_length


def speedups(machine: str, *phases: Phase) -> list[float]:
    """Return for the first, second, ... answer of an engine the time without drafts over its time with them."""
    plain = Simulation(MACHINES[machine], ASSUMED).run_constant(phases, 0)
    engines = [Simulation(MACHINES[machine], ASSUMED, noise=NOISE, seed=seed) for seed in SEEDS]
    times = [[engine.run(phases) / (1 + NOISE) for engine in engines] for _ in range(ANSWERS)]
    return [plain / statistics.mean(one) for one in times]


def best_constant(machine: str, phase: Phase) -> float:
    """Return the speedup of the best constant draft length."""
    seconds = [
        statistics.mean(Simulation(MACHINES[machine], ASSUMED, seed=seed).run_constant([phase], n) for seed in SEEDS)
        for n in (0, 1, 2, 3, 4, 7, 11, 15)
    ]
    return seconds[0] / min(seconds)


@pytest.mark.push
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("match_length", [2, 8, 32])
def test_wrong_drafts_cost_at_most_two_percent(machine: str, match_length: int) -> None:
    """This holds even if the source assumes an acceptance of 95 % and no draft token is right."""
    first, *later = speedups(machine, Phase(TOKENS, 0.0, kind(match_length)))
    assert first >= 0.97
    assert min(later) >= 0.98


@pytest.mark.push
@pytest.mark.parametrize("machine", CHEAP_ROWS)
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7])
def test_drafts_never_lose_at_any_acceptance(machine: str, rate: float) -> None:
    first, *later = speedups(machine, Phase(TOKENS, rate, kind(4)))
    assert first >= 0.97
    assert min(later) >= 0.98


def test_drafts_lose_little_where_rows_are_expensive() -> None:
    """On llama.cpp, where drafts are used only on request, it takes longer to find out that no length is worth it."""
    assert min(speedups("no gain", Phase(TOKENS, 0.7, kind(4)))) >= 0.85


@pytest.mark.push
@pytest.mark.parametrize("machine", CHEAP_ROWS)
@pytest.mark.parametrize(("match_length", "rate"), [(4, 0.5), (8, 0.7), (16, 0.9), (32, 0.97)])
def test_regret_is_small_against_the_best_constant_length(machine: str, match_length: int, rate: float) -> None:
    phase = Phase(TOKENS, rate, kind(match_length))
    first, *later = speedups(machine, phase)
    best = best_constant(machine, phase)
    assert first >= 0.8 * best
    assert statistics.mean(later) >= 0.87 * best


def test_a_source_that_was_underestimated_is_found_out() -> None:
    """A match of two tokens is assumed to be right in 35 % of all cases."""
    assert min(speedups("avx2", Phase(TOKENS, 0.95, kind(2)))) >= 1.8


def test_chatting_after_copying_loses_little() -> None:
    """The chat's matches are as long as the copy's, but wrong."""
    engine = Simulation(MACHINES["avx2"], ASSUMED)
    copying, chatting = Phase(400, 0.97, kind(32)), Phase(TOKENS, 0.0, kind(32))
    plain = Simulation(MACHINES["avx2"], ASSUMED).run_constant([chatting], 0)
    engine.run([copying])
    assert plain / engine.run([chatting]) >= 0.965
    assert plain / engine.run([chatting]) >= 0.98


def test_an_answer_that_begins_to_copy_is_noticed() -> None:
    engine = Simulation(MACHINES["avx512"], ASSUMED)
    phases = Phase(200, 0.0, kind(4)), Phase(400, 0.95, kind(4))
    plain = Simulation(MACHINES["avx512"], ASSUMED).run_constant(phases, 0)
    assert plain / engine.run(phases) >= 1.5


def test_right_tokens_that_were_not_run_restore_the_allowance() -> None:
    costs, size = StepCosts(), StepSize(1, 1, 100, 100)
    costs.observe(size, 0, 1.0)
    copying, chatting = AnswerPace(ASSUMED), AnswerPace(ASSUMED)
    for pace, n_missed in ((copying, 1), (chatting, 0)):
        pace.observe_loss(5.0)
        for _ in range(4):
            pace.observe_tokens(1, 0, n_missed)
    assert StepPlan(costs, size).best_length([kind(32)] * 4, copying, 100)[0] > 0
    assert StepPlan(costs, size).best_length([kind(32)] * 4, chatting, 100)[0] == 0


def test_a_slower_machine_changes_no_length() -> None:
    """After another program has halved the speed, the ratios return to what they were."""
    costs = StepCosts()
    size = StepSize(1, 1, 100, 100)
    for rows in [1, 8] * 20:
        costs.observe(size_with_draft(size, rows - 1, 100), 0, 1 + 0.1 * rows)
    before = costs.of_row(size, 100) / costs.of_step(size)
    for rows in [1, 8] * 40:
        costs.observe(size_with_draft(size, rows - 1, 100), 0, 2 + 0.2 * rows)
    assert costs.of_row(size, 100) / costs.of_step(size) == pytest.approx(before, rel=0.25)


def test_a_draft_model_is_not_asked_if_it_takes_too_long() -> None:
    class Timed(Drafter):
        name = "model"

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        @property
        def token_seconds(self) -> float:
            return self.seconds

        def draft(self, tokens: object, most: int, worth: object) -> Draft:
            raise AssertionError

    costs = StepCosts()
    size = StepSize(1, 1, 100, 100)
    costs.observe(size, 0, 1.0)
    pace = AnswerPace({("model", ANY): 0.8}.__getitem__)
    plan = StepPlan(costs, size)
    slow, quick = Timed(0.9), Timed(0.05)
    assert not plan.promises(slow, 1.0, pace, 100)
    assert plan.promises(quick, 1.0, pace, 100)
    assert plan.worth(quick, pace, 100, [("model", ANY)])
    assert not plan.worth(quick, pace, 100, [("model", ANY)] * 15)
