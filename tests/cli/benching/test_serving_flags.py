"""Tests of the flags of the serving benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.benching.flags import BenchFlags, serving_endpoints, serving_flag, serving_plans
from llmrun.jobs.bench.serving.plan import ServingPlan

URL = "http://127.0.0.1:9/v1#m"


def plans(**given: Any) -> list[ServingPlan]:
    flags = BenchFlags(**given)
    return serving_plans(flags, serving_flag(flags))


def test_without_its_flags_there_is_no_serving_benchmark() -> None:
    assert serving_flag(BenchFlags(endpoint=[URL], concurrency="4", chat=True)) == ""


@pytest.mark.parametrize(
    "given",
    [
        {"rate": "1"},
        {"requests": 1},
        {"duration": 1.0},
        {"burstiness": 1.0},
        {"goodput": ["ttft:1"]},
        {"seed": 0},
    ],
)
def test_each_of_its_flags_asks_for_it(given: dict[str, Any]) -> None:
    (name,) = given
    assert serving_flag(BenchFlags(**given)) == f"--{name}"


def test_every_rate_is_a_plan() -> None:
    found = plans(rate="0.5, 2,.25", requests=7, n_prompt="9", n_gen="8", seed=5, burstiness=0.5)
    assert [plan.rate for plan in found] == [0.5, 2.0, 0.25]
    first = found[0]
    assert (first.prompt, first.generate, first.requests, first.seed, first.burstiness) == (9, 8, 7, 5, 0.5)


def test_a_plan_has_the_fields_defaults() -> None:
    (plan,) = plans(requests=100)
    assert (plan.rate, plan.concurrency, plan.duration, plan.sending_s) == (None, 16, None, None)
    (plan,) = plans(seed=1)
    assert plan.sending_s == 30.0


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"workload": "mixed"}, "--workload"),
        ({"same": True}, "--same"),
        ({"price_kwh": "0.3"}, "--price-kwh"),
        ({"compare_price": "0.6"}, "--compare-price"),
    ],
)
def test_removed_flags_name_their_successors(given: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: no longer exists$") as caught:
        BenchFlags(**given).settings()
    assert caught.value.hint


def test_without_a_seed_every_run_has_other_prompts() -> None:
    """Otherwise, a server would have the prompts of the last run in its cache."""
    assert plans(requests=1)[0].seed != plans(requests=1)[0].seed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": "fast"}, "--rate: 'fast' is not a number of requests per second"),
        ({"rate": "0"}, "--rate: '0'"),
        ({"rate": "1,"}, "--rate: ''"),
        ({"rate": "1e9"}, "--rate: '1e9'"),
        ({"rate": "-1"}, "--rate: '-1'"),
        ({"rate": "2x"}, "--rate: '2x': multiples of the capacity no longer exist"),
        ({"rate": "1", "n_depth": "9"}, "--n-depth: cannot be combined with --rate"),
        ({"burstiness": 2.0}, "--burstiness: needs --rate"),
        ({"burstiness": -1.0, "rate": "1"}, "--burstiness: -1 is not between"),
        ({"duration": float("nan")}, "--duration: nan is not between"),
        ({"rate": "2", "concurrency": "4"}, "--concurrency: cannot be combined with --rate"),
        ({"rate": "2", "n_prompt": "1,2"}, "--n-prompt: '1,2': lists are not supported"),
        ({"goodput": ["speed:1"]}, "--goodput: 'speed:1'"),
        ({"rate": "1", "output": "csv"}, "-o csv: not supported with --rate: use one of table, md, json, jsonl"),
        ({"rate": "1", "cold": True}, "--cold: cannot be combined with --rate"),
        ({"rate": "1", "chat": True}, "--chat: cannot be combined with --rate"),
        ({"rate": "1", "prompts": Path("a")}, "--prompts: cannot be combined with --rate"),
        ({"rate": "1", "seconds": 5.0}, "--seconds: cannot be combined with --rate"),
        ({"rate": "1", "save": True}, "--save: cannot be combined with --rate"),
        ({"rate": "1", "threads": "4"}, "--threads: cannot be combined with --rate"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plans(**given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("endpoint", "models"), [(None, []), (None, ["a.gguf"]), ([URL], ["a.gguf"])])
def test_only_servers_can_be_measured(endpoint: list[str] | None, models: list[str]) -> None:
    with pytest.raises(UsageError, match="--rate: works only for a server"):
        serving_endpoints(BenchFlags(endpoint=endpoint), models, "--rate")


def test_urls_among_the_models_are_endpoints() -> None:
    assert serving_endpoints(BenchFlags(endpoint=[URL]), [URL + "2"], "--rate") == [URL, URL + "2"]
    with pytest.raises(UsageError, match="endpoint"):
        serving_endpoints(BenchFlags(endpoint=["nonsense"]), [], "--rate")
