"""Tests of computing the energy of an answer."""

from __future__ import annotations

import pytest

from llmrun.jobs.bench.system import beside_api, energy_of


def test_energy_and_its_cost_for_a_million_tokens() -> None:
    found = energy_of(720.0, 24.0, 200, source="RAPL package", price_kwh=0.30)
    assert found is not None
    assert (found.watts, found.joules_per_token) == (30.0, 3.6)
    assert found.cost_per_million == pytest.approx(0.30)  # 3.6 J per token is one kilowatt-hour per million
    free = energy_of(720.0, 24.0, 200, source="RAPL package")
    assert free is not None
    assert free.cost_per_million is None
    assert energy_of(720.0, 24.0, 0, source="RAPL package") is None


@pytest.mark.parametrize(
    ("cost", "price", "ratio", "words"),
    [
        (0.04, 0.60, 1 / 15, "costs 0.04, and the API charges 0.6: 15 times cheaper."),
        (0.9, 0.60, 1.5, "costs 0.9, and the API charges 0.6: 1.5 times the price."),
        (0.0, 0.60, 0.0, "is free here, and the API charges 0.6 for a million tokens."),
    ],
)
def test_electricity_beside_an_api(cost: float, price: float, ratio: float, words: str) -> None:
    found, sentence = beside_api(cost, price)
    assert found == pytest.approx(ratio)
    assert sentence.endswith(words)


def test_an_api_that_costs_nothing_cannot_be_compared_with() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        beside_api(1.0, 0.0)
