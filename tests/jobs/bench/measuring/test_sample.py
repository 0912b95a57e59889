"""Tests of computing a turn's numbers from clock readings."""

from __future__ import annotations

import pytest
from msgspec import convert

from llmrun.base.types import Timings
from llmrun.jobs.bench.measuring.asking import Sample, joined
from llmrun.jobs.bench.measuring.pool import CODEC

FIRST = Timings(
    load_s=9.0,
    prompt_tokens=100,
    cached_tokens=20,
    generated_tokens=5,
    prefill_s=0.4,
    ttft_s=0.5,
    decode_s=0.8,
    total_s=1.3,
    gaps_s=(0.1, 0.2, 0.2, 0.3),
)
SECOND = Timings(
    load_s=9.0,
    prompt_tokens=50,
    cached_tokens=0,
    generated_tokens=3,
    prefill_s=0.1,
    ttft_s=0.1,
    decode_s=0.2,
    total_s=0.3,
    gaps_s=(0.1, 0.1),
)


def test_the_figures_of_a_turn_are_those_of_its_requests() -> None:
    sample = Sample((FIRST, SECOND), seconds=1.6)
    assert sample.values("ttft") == [0.5, 0.1]
    assert sample.values("itl") == [0.1, 0.2, 0.2, 0.3, 0.1, 0.1]
    assert sample.values("tpot") == pytest.approx([0.2, 0.1])
    assert sample.values("decode") == pytest.approx([5.0, 10.0])
    assert sample.values("e2e") == [1.3, 0.3]
    assert sample.value("prefill") == pytest.approx((80 + 50) / 0.5)
    assert sample.value("decode") == pytest.approx((4 + 2) / 1.0)
    assert sample.value("throughput") == pytest.approx(8 / 1.6)
    assert sample.value("requests") == pytest.approx(2 / 1.6)
    assert sample.value("cold") is None


def test_a_single_token_is_no_prompt_and_a_single_token_out_is_no_decode() -> None:
    short = Timings(0.0, 1, 0, 1, 0.01, 0.01, 0.0, 0.01)
    sample = Sample((short,), 0.01)
    assert (sample.value("prefill"), sample.value("decode"), sample.value("tpot")) == (None, None, None)
    assert sample.value("ttft") == 0.01


def test_an_answer_of_nothing_counts_nowhere() -> None:
    nothing = Timings(0.0, 10, 0, 0, 0.0, 0.0, 0.0, 0.5)
    sample = Sample((nothing,), 0.5)
    assert all(sample.value(name) is None for name in ("ttft", "prefill", "decode", "e2e", "throughput", "requests"))


def test_runs_of_one_turn_add_up() -> None:
    turn = joined([Sample((FIRST,), 1.3), Sample((SECOND,), 0.3)])
    assert (len(turn.requests), turn.generated) == (2, 8)
    assert turn.seconds == pytest.approx(1.6)


def test_a_sample_survives_the_way_from_another_process() -> None:
    sample = Sample((FIRST, SECOND), 1.6)
    assert convert(CODEC.decode(CODEC.encode(sample)), Sample) == sample
