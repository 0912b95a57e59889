"""Tests of turning samples into the document: figures, shares of the limits, and verdicts on comparable results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmrun.base.errors import DoesNotFit
from llmrun.base.types import Timings
from llmrun.jobs.bench.documents.document import AnswerCheck, from_json, to_json
from llmrun.jobs.bench.measuring.asking import Sample
from llmrun.jobs.bench.measuring.pool import OpenedFacts
from llmrun.jobs.bench.measuring.results import document, is_precise, verdicts
from llmrun.jobs.bench.measuring.runner import Outcome, Trial
from llmrun.jobs.bench.measuring.workload import BenchTarget, Configuration, Workload, cold_starts, synthetic

PLAIN = synthetic(100, 11, 0, 1)
FACTS = {
    "backend": "cpu",
    "threads": 2,
    "kv_type": "f16",
    "load_s": 0.5,
    "compiled": False,
    "weight_bytes": 1_000_000,
    "kv_bytes_per_token": 100,
    "prefill_products": 2_000_000,
    "parameters": 3,
}


def request(decode_s: float, prefill_s: float = 0.1, prompt: int = 100) -> Timings:
    gaps = (decode_s / 10,) * 10
    return Timings(0.5, prompt, 0, 11, prefill_s, prefill_s, decode_s, prefill_s + decode_s, gaps)


def speculating(speculate: str, seconds: list[float], answers: Sequence[tuple[str, ...]]) -> Trial:
    """Return a trial with 11 tokens in 5 steps if it speculates, and with these answers, one tuple per round."""
    target = BenchTarget("a", "/models/a.gguf", backend="cpu", speculate=speculate)
    steps = 11 if speculate == "off" else 5
    timings = [replace(request(s), steps=steps, drafted_tokens=8, accepted_tokens=6) for s in seconds]
    samples = [Sample((one,), 1.0, answers=said) for one, said in zip(timings, answers, strict=True)]
    return Trial(Configuration(f"speculate {speculate}", target, PLAIN), samples)


def exact_outcome(*trials: Trial, exact: bool = True) -> Outcome:
    outcome = outcome_of(*trials)
    for opened in outcome.opened.values():
        opened.facts = {**FACTS, "batch_invariant": exact}
    return outcome


def trial(model: str, decode_s: list[float], workload: Workload = PLAIN) -> Trial:
    configuration = Configuration(model, BenchTarget(model, f"/models/{model}.gguf", backend="cpu"), workload)
    return Trial(configuration, [Sample((request(seconds),), 0.1 + seconds) for seconds in decode_s])


def outcome_of(*trials: Trial) -> Outcome:
    opened = {one.configuration.target: OpenedFacts(FACTS, [0.5], 5_000_000) for one in trials}
    return Outcome(list(trials), opened, bandwidths=[1e9, 3e9, 2e9], multiply_rates=[1e12, 4e12])


STEADY = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0]


def test_a_document_has_the_figures_of_all_requests_and_survives_its_json() -> None:
    outcome = outcome_of(trial("a", STEADY), trial("b", [2 * seconds for seconds in STEADY]))
    outcome.trials[1].failure = DoesNotFit("too big", hint="smaller")
    found = document(outcome, command="llmrun bench", system={"os": "any"}, digests={})
    first, second = found.results
    assert first.figures["decode"].median == pytest.approx(10.0)
    assert first.figures["itl"].count == 100
    assert first.figures["load"].count == 1
    assert first.peak_memory == 5_000_000
    assert first.totals is not None
    assert (first.totals.requests, first.totals.output_tokens) == (10, 110)
    assert len(first.gaps) == 101
    assert second.failure is not None
    assert (second.failure.message, second.failure.exit_code) == ("too big", 7)
    assert from_json(to_json(found), "here") == found


def test_shares_are_of_the_median_bandwidth_and_the_best_multiply_rate() -> None:
    found = document(outcome_of(trial("a", STEADY)), command="", system={}, digests={})
    roofline = found.results[0].roofline
    assert roofline is not None
    held = 100 + 11 / 2
    assert roofline.bytes_per_token == pytest.approx(1_000_000 + 100 * held)
    assert roofline.decode_share == pytest.approx(10 * roofline.bytes_per_token / 2e9)
    assert roofline.prefill_share == pytest.approx(1000 * 2_000_000 / 4e12)


def test_layers_with_a_window_read_no_more_than_that() -> None:
    outcome = outcome_of(trial("a", STEADY))
    windows = {"64": 10, "1000": 1}
    outcome.opened[outcome.trials[0].configuration.target].facts = {**FACTS, "kv_bytes_per_token_of_window": windows}
    roofline = document(outcome, command="", system={}, digests={}).results[0].roofline
    assert roofline is not None
    held = 100 + 11 / 2
    assert roofline.bytes_per_token == pytest.approx(1_000_000 + 100 * held + 10 * 64 + 1 * held)


def test_requests_together_and_layers_on_a_gpu_have_no_share() -> None:
    together = outcome_of(trial("a", STEADY, synthetic(100, 11, 0, 4)))
    roofline = document(together, command="", system={}, digests={}).results[0].roofline
    assert roofline is not None
    assert (roofline.decode_share, roofline.prefill_share) == (None, None)
    on_gpu = outcome_of(trial("a", STEADY))
    on_gpu.opened[on_gpu.trials[0].configuration.target].facts = {**FACTS, "gpu_layers": "33/33"}
    assert document(on_gpu, command="", system={}, digests={}).results[0].roofline is None


def test_a_verdict_is_between_a_configuration_and_the_first_of_its_workload() -> None:
    other = synthetic(200, 11, 0, 1)
    trials = [
        trial("a", STEADY),
        trial("b", [seconds / 2 for seconds in STEADY]),
        trial("a", STEADY, other),
        trial("b", [2 * seconds for seconds in STEADY], other),
    ]
    found = {(one.of, one.against, one.metric): one for one in verdicts(trials)}
    assert set(found) == {(of, against, metric) for of, against in ((1, 0), (3, 2)) for metric in ("prefill", "decode")}
    assert found[1, 0, "decode"].ratio == pytest.approx(2.0, rel=0.02)
    assert found[1, 0, "decode"].is_different
    assert found[3, 2, "decode"].ratio == pytest.approx(0.5, rel=0.02)
    assert not found[3, 2, "prefill"].is_different


def test_one_that_failed_at_once_is_compared_with_nobody() -> None:
    trials = [trial("a", []), trial("b", STEADY), trial("c", STEADY)]
    assert {(one.of, one.against) for one in verdicts(trials)} == {(2, 1)}


def test_too_few_rounds_make_no_verdict_and_an_unfinished_round_is_no_pair() -> None:
    assert verdicts([trial("a", STEADY[:3]), trial("b", STEADY[:3])]) == []
    assert verdicts([trial("a", STEADY), trial("b", STEADY[:-1])])


def test_cold_starts_are_judged_by_their_first_token() -> None:
    trials = [
        Trial(
            Configuration(name, BenchTarget(name, name), cold_starts()),
            [Sample((), 2.0, cold=scale * s) for s in STEADY],
        )
        for name, scale in (("a", 1.0), ("b", 2.0))
    ]
    (found,) = verdicts(trials)
    assert (found.metric, found.is_different) == ("cold", True)
    assert found.ratio == pytest.approx(0.5, rel=0.02)


def test_it_is_enough_when_every_interval_is_narrow_whatever_it_says() -> None:
    calm = [1 + 0.002 * math.sin(1.7 * number) for number in range(16)]
    assert is_precise([trial("a", calm), trial("b", [1.5 * seconds for seconds in calm])])
    assert is_precise([trial("a", calm)])
    wild = [1.0, 1.6, 0.7, 1.2] * 4
    assert not is_precise([trial("a", calm), trial("b", wild)])
    assert not is_precise([trial("a", calm[:4]), trial("b", calm[:4])])


def test_answers_with_and_without_speculation_are_compared_round_by_round() -> None:
    off = speculating("off", STEADY, [("x", "y")] * 10)
    auto = speculating("auto", STEADY[:9], [("x", "y")] * 8 + [("x", "z")])
    for exact in (True, False):
        found = document(exact_outcome(off, auto, exact=exact), command="", system={}, digests={})
        assert found.answer_checks == (AnswerCheck(1, 0, answers=18, different=1, is_exact=exact),)
        assert from_json(to_json(found), "here") == found


def test_answers_of_different_backends_are_not_compared() -> None:
    trials = trial("a", STEADY), trial("b", STEADY)
    assert document(outcome_of(*trials), command="", system={}, digests={}).answer_checks == ()


def test_speculation_is_judged_by_decode_alone() -> None:
    off = speculating("off", STEADY, [()] * 10)
    auto = speculating("auto", [seconds / 2 for seconds in STEADY], [()] * 10)
    (found,) = verdicts([off, auto])
    assert (found.metric, round(found.ratio, 1)) == ("decode", 2.0)
    assert len(verdicts([off, auto, trial("b", STEADY)])) == 4


def test_a_step_of_several_tokens_reads_the_weights_once() -> None:
    outcome = exact_outcome(speculating("off", STEADY, [()] * 10), speculating("auto", STEADY, [()] * 10))
    off, auto = (one.roofline for one in document(outcome, command="", system={}, digests={}).results)
    assert off is not None
    assert auto is not None
    assert auto.bytes_per_token == pytest.approx(off.bytes_per_token * 5 / 11)


def test_totals_count_steps_and_drafts() -> None:
    outcome = exact_outcome(speculating("auto", STEADY, [()] * 10))
    result = document(outcome, command="", system={}, digests={}).results[0]
    assert result.subject.speculate == "auto"
    assert result.totals is not None
    assert (result.totals.tokens_per_step, result.totals.acceptance) == (2.2, 0.75)
