"""Tests of when warm-up ends and when rounds end (llmrun/jobs/bench/statistics.py)."""

from __future__ import annotations

import numpy as np
import pytest

from llmrun.jobs.bench.statistics import MAXIMUM_WARMUPS, WINDOW, are_narrow, is_stable


def warmups(values: list[float]) -> int:
    return next(count for count in range(1, len(values) + 1) if is_stable(values[:count]))


def sample(count: int, *, seed: int, spread: float, factor: float = 1.0) -> dict[str, list[float]]:
    random = np.random.default_rng(seed)
    return {name: (factor * np.exp(spread * random.standard_normal(count))).tolist() for name in ("prefill", "decode")}


def ends(*samples: dict[str, list[float]]) -> bool:
    pairs = [(index, 0) for index in range(1, len(samples))]
    return are_narrow(samples, pairs, ("prefill", "decode"))


def test_steady_warmups_are_enough_once_there_is_a_window_of_them() -> None:
    assert warmups([1.0] * 20) == WINDOW


def test_a_cold_first_turn_costs_at_most_one_more() -> None:
    assert warmups([2.0] + [1.0] * 20) <= WINDOW + 1


@pytest.mark.parametrize("direction", [1, -1])
def test_a_trend_is_waited_out(direction: int) -> None:
    """The clock slows down or the cache fills: values are 30 %, 16 %, 8 %, ... away from the final level."""
    values = [1 + direction * 0.3 * 0.55**i for i in range(30)]
    count = warmups(values)
    assert WINDOW + 1 < count < MAXIMUM_WARMUPS
    assert values[count - 1] == pytest.approx(1, abs=0.01)


def test_noise_is_not_taken_for_a_trend() -> None:
    counts = [warmups(sample(30, seed=seed, spread=0.08)["decode"]) for seed in range(100)]
    assert float(np.mean(counts)) < WINDOW + 1.5


def test_a_machine_that_is_never_steady_is_measured_as_it_is() -> None:
    assert warmups([1.1**i for i in range(30)]) == MAXIMUM_WARMUPS


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_warmup_that_no_clock_gives_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        is_stable([1.0, bad])


def test_rounds_go_on_below_the_minimum_however_steady() -> None:
    steady = [{"prefill": [1.0] * n, "decode": [2.0] * n} for n in (6, 8)]
    assert not ends(steady[0], steady[0])
    assert ends(steady[1], steady[1])


def test_rounds_end_only_when_both_orders_were_run() -> None:
    steady = {"prefill": [1.0] * 9, "decode": [2.0] * 9}
    assert not ends(steady, steady)


def test_every_metric_of_every_pair_must_be_narrow() -> None:
    narrow, wide = sample(20, seed=1, spread=0.01), sample(20, seed=2, spread=0.3)
    other = sample(20, seed=3, spread=0.01)
    mixed = {"prefill": other["prefill"], "decode": wide["decode"]}
    assert ends(narrow, other)
    assert not ends(narrow, mixed)
    assert not ends(narrow, other, wide)


def test_the_width_decides_and_not_what_the_interval_says() -> None:
    a = sample(20, seed=1, spread=0.02)
    for spread in (0.02, 0.2):
        said = {
            ends(a, {name: [factor * value for value in values] for name, values in b.items()})
            for b in [sample(20, seed=5, spread=spread)]
            for factor in (0.5, 1.0, 1.03, 1.1, 40.0)
        }
        assert said == {spread == 0.02}


def test_one_configuration_alone_is_judged_by_its_own_interval() -> None:
    assert ends(sample(30, seed=1, spread=0.02))
    assert not ends(sample(30, seed=1, spread=0.2))
