"""Tests of the prompts of the workloads, and of the groups in which their requests are reported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from llmrun.jobs.bench.serving.plan import MIXED, OVERLOAD, RANDOM, SHARED_PREFIX, WORKLOADS, ServingPlan
from llmrun.jobs.bench.serving.workloads import LONG, SHORT, RequestMaker, groups_of
from tests.support.bench.serving import accepted, record, rejected

PLAN = ServingPlan(prompt=5, generate=3, depth=7, seed=1)


def maker(workload: str, **fields: Any) -> RequestMaker:
    return RequestMaker(replace(PLAN, workload=workload, **fields), "tiny")


def body(workload: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(maker(workload).request(number).content)
    return found


def words(workload: str, number: int) -> list[str]:
    return str(body(workload, number)["prompt"]).split()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_requests_depend_only_on_the_seed_and_the_number(workload: str) -> None:
    assert maker(workload).request(3) == maker(workload).request(3)
    assert maker(workload).request(3).content != maker(workload).request(4).content
    assert maker(workload).request(3).content != maker(workload, seed=2).request(3).content


def test_a_request_has_only_standard_fields_and_ignore_eos() -> None:
    standard = {"model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options"}
    assert set(body(RANDOM, 0)) == standard | {"ignore_eos"}
    without = RequestMaker(PLAN, "tiny", left_out=("ignore_eos",)).request(0)
    assert set(json.loads(without.content)) == standard


def test_prompts_have_the_length_of_the_plan() -> None:
    assert [len(words(RANDOM, number)) for number in range(20)] == [5] * 20
    assert body(RANDOM, 0)["max_tokens"] == 3


def test_a_shared_prefix_comes_before_different_prompts() -> None:
    one, other = words(SHARED_PREFIX, 0), words(SHARED_PREFIX, 1)
    assert len(one) == len(other) == 12
    assert one[:7] == other[:7]
    assert one[7:] != other[7:]


def test_one_of_sixteen_mixed_prompts_is_long() -> None:
    requests = [maker(MIXED).request(number) for number in range(32)]
    lengths = [len(json.loads(request.content)["prompt"].split()) for request in requests]
    assert sorted(lengths) == [5] * 30 + [12] * 2
    assert [length > 5 for length in lengths] == [request.group == LONG for request in requests]
    assert requests[0].group == SHORT, "the first request is short"


def test_requests_are_grouped_by_the_shared_prefix() -> None:
    records = [record(0.0, (5.0,)), record(4.0, (5.1,)), record(6.0, (6.1,))]
    groups = {group.name: len(group.records) for group in groups_of(SHARED_PREFIX, records)}
    assert groups == {"all": 3, "prefix new": 2, "prefix cached": 1}


def test_short_requests_are_grouped_by_a_long_prompt_beside_them() -> None:
    """The long prompt is processed from 10 to 20."""
    records = [
        record(10.0, (20.0, 21.0), group=LONG),
        record(0.0, (1.0, 2.0, 12.0, 30.0, 31.0), group=SHORT),  # its answer overlaps
        record(11.0, (19.0, 19.5), group=SHORT),  # waits beside it
        record(30.0, (31.0,), group=SHORT),
    ]
    groups = {group.name: group for group in groups_of(MIXED, records)}
    alone, beside = groups["short, without a long prompt"], groups["short, beside a long prompt"]
    assert [one.due for one in alone.records] == [0.0, 30.0]
    assert [one.due for one in beside.records] == [11.0]
    assert alone.gaps == [1.0, 1.0]
    assert beside.gaps == [10.0, 18.0, 0.5]
    assert len(groups["long"].records) == 1


def test_requests_are_grouped_by_a_429() -> None:
    records = [record(), record(0.0, (5.0,), tries=[rejected(0.0, 1.0), accepted(1.0)])]
    assert [group.name for group in groups_of(OVERLOAD, records)] == ["all", "accepted at once", "after a 429"]
    assert [group.name for group in groups_of(OVERLOAD, records[:1])] == ["all"]
