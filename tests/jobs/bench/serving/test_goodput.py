"""Tests of the limits of --goodput."""

from __future__ import annotations

import pytest

from llmrun.base.errors import UsageError
from llmrun.jobs.bench.serving.plan import goodput_words, meets, parse_goodput


@pytest.mark.parametrize(
    "texts",
    [["ttft:500,itl:150"], ["ttft:500 itl:150"], ["ttft:0.5s", "itl:150ms"], ["ttft:500, itl:.15s"]],
)
def test_limits_are_read_in_milliseconds(texts: list[str]) -> None:
    assert parse_goodput(texts) == {"ttft": 0.5, "itl": 0.15}


def test_the_name_of_vllm_means_e2e() -> None:
    assert parse_goodput(["e2el:2s"]) == {"e2e": 2.0}


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft:", "ttft:0", "ttft:-5", "ttft:1e3", "ttft:nan", "speed:5", "ttft:5m", "ttft:1,ttft:2", ","],
)
def test_a_bad_limit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput"):
        parse_goodput([text])


def test_a_request_meets_limits_it_reaches_exactly() -> None:
    assert meets({"ttft": 0.5, "itl": 0.1}, {"ttft": 0.5})
    assert not meets({"ttft": 0.501}, {"ttft": 0.5})
    assert not meets({"ttft": 0.1, "itl": 0.2}, {"ttft": 0.5, "itl": 0.15})


def test_an_answer_of_one_token_has_no_gap_to_limit() -> None:
    assert meets({"ttft": 0.1, "e2e": 0.1}, {"tpot": 0.001, "itl": 0.001})


def test_limits_are_shown_in_milliseconds() -> None:
    assert goodput_words({"ttft": 0.5, "itl": 0.15}) == "TTFT <= 500 ms, ITL <= 150 ms"
