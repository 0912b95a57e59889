"""Tests that timings add up, by vLLM's definitions."""

from __future__ import annotations

import pytest

from llmrun.engine.base import request_timings


def test_the_parts_of_a_request_add_up() -> None:
    timings = request_timings(
        load_s=2.0,
        submitted=10.0,
        prefill_started=10.5,
        step_times=[11.0, 11.25, 12.0],
        ended=13.0,
        prompt_tokens=30,
        cached_tokens=10,
        generated_tokens=3,
    )
    assert timings.ttft_s == 1.0
    assert timings.prefill_s == 0.5
    assert timings.decode_s == 1.0
    assert timings.total_s == timings.ttft_s + timings.decode_s
    assert timings.gaps_s == (0.25, 0.75)
    assert timings.tpot_s == 0.5
    assert timings.prompt_per_second == 40
    assert timings.decode_per_second == 2
    assert timings.load_s == 2.0


@pytest.mark.parametrize("step_times", [[], [5.0]])
def test_no_token_and_one_token_divide_nothing_by_zero(step_times: list[float]) -> None:
    timings = request_timings(
        load_s=0,
        submitted=1.0,
        prefill_started=2.0,
        step_times=step_times,
        ended=5.0,
        prompt_tokens=3,
        cached_tokens=0,
        generated_tokens=len(step_times),
    )
    assert timings.generated_tokens == len(step_times)
    assert timings.total_s == 4.0
    assert timings.ttft_s == (4.0 if step_times else 0.0)
    assert (timings.decode_s, timings.tpot_s, timings.decode_per_second, timings.gaps_s) == (0, 0, 0, ())
