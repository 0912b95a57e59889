"""Tests of figures with their units, and of verdicts as sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmrun.jobs.bench.documents.document import (
    AnswerCheck,
    Document,
    Verdict,
    answer_sentences,
    metric_words,
    result_names,
    verdict_sentence,
)
from tests.support.bench.documents import sweep, two_backends


def test_figures_bring_their_units() -> None:
    assert metric_words("decode", 92.04) == "92.0 tok/s"
    assert metric_words("requests", 3.02) == "3.02 requests/s"
    assert metric_words("itl", 0.0083) == "8.30 ms"
    assert metric_words("from a later llmrun", 7.5) == "7.50"


def sentence(verdict: Verdict, of: Document | None = None) -> str:
    return verdict_sentence(of or two_backends(), verdict)


def test_a_verdict_is_a_sentence() -> None:
    assert sentence(Verdict("decode", 0, 1, 1.84, 1.79, 1.9)) == (
        "cpu is 1.84x as fast as llama in decode (99%: 1.79 to 1.90)"
    )
    assert sentence(Verdict("ttft", 1, 0, 0.536, 0.51, 0.55, 0.95)) == (
        "cpu is 1.87x as fast as llama in TTFT (95%: 1.82 to 1.96)"
    )


def test_a_verdict_that_shows_nothing_claims_nothing() -> None:
    assert sentence(Verdict("prefill", 0, 1, 1.01, 0.97, 1.04)) == (
        "no significant difference between cpu and llama in prefill (99%: 0.97 to 1.04)"
    )


def test_a_small_difference_is_written_so_that_its_interval_does_not_hold_1() -> None:
    assert sentence(Verdict("decode", 0, 1, 1.012, 1.003, 1.021)).endswith("(99%: 1.003 to 1.021)")
    assert sentence(Verdict("decode", 0, 1, 0.9994, 0.9989, 0.99991)).endswith("(99%: 1.0001 to 1.0011)")


def test_a_verdict_within_a_sweep_says_which_workload_it_is_about() -> None:
    assert sentence(Verdict("decode", 3, 5, 1.84, 1.79, 1.9), sweep()) == (
        "cpu, 2 threads is 1.84x as fast as llama, 2 threads in decode (512 in, 128 out; 99%: 1.79 to 1.90)"
    )
    assert sentence(Verdict("decode", 0, 3, 1.84, 1.79, 1.9), sweep()).startswith(
        "cpu, 2 threads · 128 in, 128 out is 1.84x as fast as cpu, 2 threads · 512 in, 128 out in decode (99%"
    )


def test_results_are_named_by_what_tells_them_apart() -> None:
    assert result_names(two_backends()) == ("cpu", "llama")
    assert result_names(sweep())[4] == "cpu, 1 thread · 512 in, 128 out"


def test_equal_and_different_answers_are_counted_over_all_workloads() -> None:
    made = two_backends()
    checks = (AnswerCheck(1, 0, 8, 0, is_exact=True), AnswerCheck(1, 0, 4, 0, is_exact=True))
    assert answer_sentences(replace(made, answer_checks=checks)) == ["llama: all 12 answers equal those of cpu"]
    differing = (*checks, AnswerCheck(1, 0, 4, 3, is_exact=True))
    assert answer_sentences(replace(made, answer_checks=differing)) == [
        "llama: 3 of 16 answers differ from those of cpu"
    ]


@pytest.mark.parametrize(("different", "expected"), [(0, "equals"), (1, "differs from")])
def test_a_single_answer_is_reported_in_the_singular(different: int, expected: str) -> None:
    made = replace(two_backends(), answer_checks=(AnswerCheck(1, 0, 1, different, is_exact=True),))
    assert answer_sentences(made) == [f"llama: the answer {expected} that of cpu"]
