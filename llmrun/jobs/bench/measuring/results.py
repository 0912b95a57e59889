"""Converts measurements to a result document with metrics, comparisons with the machine's limits, and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from llmrun.backends.sizing import KVBytes
from llmrun.jobs.bench.documents.document import (
    METRICS,
    AnswerCheck,
    Distribution,
    Document,
    Failure,
    Result,
    Roofline,
    Subject,
    Totals,
    Verdict,
)
from llmrun.jobs.bench.measuring.asking import Sample
from llmrun.jobs.bench.measuring.pool import OpenedFacts
from llmrun.jobs.bench.measuring.runner import Outcome, Trial
from llmrun.jobs.bench.measuring.workload import BenchTarget
from llmrun.jobs.bench.statistics import MINIMUM_ROUNDS, Interval, are_narrow, distribution, paired_ratio, verdict_level

_OWN_FACTS = (
    "backend",
    "threads",
    "gpu_layers",
    "kv_type",
    "load_s",
    "compiled",
    "batch_invariant",
)  # Subject.facts omits these entries. Most entries have separate fields in Subject.
JUDGED = ("prefill", "decode")  # The metrics that most verdicts compare. See `judged_metrics`.


def document(outcome: Outcome, *, command: str, system: Mapping[str, Any], digests: Mapping[str, str]) -> Document:
    """Return the document of a run. `digests` maps the path of each model file to its sha256."""
    created = datetime.now(UTC)
    return Document(
        identity=f"{created:%Y%m%d-%H%M%S}-{token_hex(2)}",
        created=created.isoformat(timespec="seconds"),
        command=command,
        system={
            **system,
            "read_bandwidth": statistics.median(outcome.bandwidths) if outcome.bandwidths else None,
            "multiply_rate": max(outcome.multiply_rates, default=None),
        },
        results=tuple(_result(trial, outcome, digests) for trial in outcome.trials),
        verdicts=tuple(verdicts(outcome.trials)),
        interrupted=outcome.interrupted,
        answer_checks=tuple(answer_checks(outcome)),
    )


def judged_metrics(group: Sequence[Trial]) -> tuple[str, ...]:
    """Return the metrics that verdicts about the trials of a workload compare."""
    facts = group[0].configuration.workload.facts
    if facts.kind == "cold":
        return ("cold",)
    if facts.concurrency > 1:
        return ("throughput",)
    first, *others = (trial.configuration.target for trial in group)
    # Speculation does not affect prefill. A verdict about prefill would only widen the intervals of the other verdicts.
    return ("decode",) if others and all(_differ_only_in_speculation(first, one) for one in others) else JUDGED


def _differ_only_in_speculation(one: BenchTarget, other: BenchTarget) -> bool:
    return replace(one, speculate=other.speculate, draft=other.draft) == other


def samples_of(trial: Trial, metric: str) -> list[float]:
    """Return the values of a metric, one per round."""
    values = (sample.value(metric) for sample in trial.samples)
    return [value for value in values if value is not None]


def verdicts(trials: Sequence[Trial]) -> list[Verdict]:
    """Compare each configuration with the first measured configuration of the same workload."""
    number_of = {id(trial): number for number, trial in enumerate(trials)}
    pairs = [
        (metric, number_of[id(trial)], number_of[id(group[0])])
        for group in groups(trials)
        for trial in group[1:]
        for metric in judged_metrics(group)
        if _rounds(trial, group[0], metric) >= MINIMUM_ROUNDS
    ]
    level = verdict_level(max(1, len(pairs)))
    return [Verdict(*pair, *_ratio(trials, *pair, level)) for pair in pairs]


def groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Group the measured trials by workload. The first trial of a group is the baseline for the others."""
    measured = [trial for trial in trials if trial.samples]
    return [list(group) for _, group in groupby(measured, key=lambda trial: trial.configuration.workload.facts)]


def answer_checks(outcome: Outcome) -> list[AnswerCheck]:
    """Compare the answers of configurations that differ only in speculation, round by round."""
    number_of = {id(trial): number for number, trial in enumerate(outcome.trials)}
    found = []
    for group in groups(outcome.trials):
        for index, trial in enumerate(group):
            target = trial.configuration.target
            alike = (one for one in group[:index] if _differ_only_in_speculation(one.configuration.target, target))
            first = next(alike, None)
            if first is None:
                continue
            pairs = [
                pair
                for ours, theirs in zip(trial.samples, first.samples, strict=False)
                for pair in zip(ours.answers, theirs.answers, strict=True)
            ]
            if not pairs:
                continue
            different = sum(one != other for one, other in pairs)
            is_exact = bool(outcome.opened[target].facts.get("batch_invariant"))
            found.append(AnswerCheck(number_of[id(trial)], number_of[id(first)], len(pairs), different, is_exact))
    return found


def is_precise(trials: Sequence[Trial]) -> bool:
    """Return whether the confidence intervals of all verdicts are narrow.

    For a configuration that is not compared with another configuration, the intervals of its own metrics count.
    """
    for group in groups(trials):
        metrics = [metric for metric in judged_metrics(group) if all(samples_of(one, metric) for one in group)]
        samples = [{metric: samples_of(one, metric) for metric in metrics} for one in group]
        pairs = [(number, 0) for number in range(1, len(group))]
        if not metrics or not are_narrow(samples, pairs, metrics):
            return False
    return True


def _rounds(trial: Trial, beside: Trial, metric: str) -> int:
    """Return the number of rounds that both trials completed."""
    return min(len(samples_of(trial, metric)), len(samples_of(beside, metric)))


def _ratio(trials: Sequence[Trial], metric: str, of: int, against: int, level: float) -> Interval:
    rounds = _rounds(trials[of], trials[against], metric)
    ours, theirs = (samples_of(trials[number], metric)[:rounds] for number in (of, against))
    return paired_ratio(ours, theirs, is_speed=METRICS[metric].is_speed, level=level)


def _result(trial: Trial, outcome: Outcome, digests: Mapping[str, str]) -> Result:
    configuration = trial.configuration
    opened = outcome.opened.get(configuration.target, OpenedFacts())
    samples = {name: tuple(samples_of(trial, name)) for name in METRICS}
    if opened.loads:
        samples["load"] = tuple(opened.loads)
    return Result(
        subject=_subject(trial, opened.facts, digests),
        workload=configuration.workload.facts,
        figures=_figures(trial, opened),
        samples={name: values for name, values in samples.items() if values},
        gaps=_gap_percentiles(trial.samples),
        peak_memory=opened.peak_memory,
        totals=_totals(trial.samples),
        roofline=_roofline(trial, opened.facts, outcome),
        failure=Failure(str(trial.failure), trial.failure.hint, trial.failure.exit_code) if trial.failure else None,
    )


def _subject(trial: Trial, facts: Mapping[str, Any], digests: Mapping[str, str]) -> Subject:
    target = trial.configuration.target
    own = {name: value for name, value in facts.items() if name not in _OWN_FACTS}
    if target.path:
        own["file"] = Path(target.path).name
    if target.path in digests:
        own["sha256"] = digests[target.path]
    if target.draft in digests:
        own["draft_sha256"] = digests[target.draft]
    backend = facts.get("backend", target.backend)
    return Subject(
        name=trial.configuration.name or backend,
        model=target.model,
        backend=backend,
        threads=facts.get("threads", target.threads or 0),
        kv_type=facts.get("kv_type", target.kv_type or ""),
        gpu_layers=facts.get("gpu_layers", ""),
        endpoint=target.endpoint,
        facts=own,
        speculate="" if target.endpoint else target.speculate,
    )


def _totals(samples: Sequence[Sample]) -> Totals | None:
    requests = [request for sample in samples for request in sample.requests]
    if not requests:
        return None
    return Totals(
        requests=len(requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        output_tokens=sum(request.generated_tokens for request in requests),
        seconds=sum(sample.seconds for sample in samples),
        steps=sum(request.steps for request in requests),
        drafted_tokens=sum(request.drafted_tokens for request in requests),
        accepted_tokens=sum(request.accepted_tokens for request in requests),
    )


def _figures(trial: Trial, opened: OpenedFacts) -> dict[str, Distribution]:
    values = {name: [value for sample in trial.samples for value in sample.values(name)] for name in METRICS}
    values["load"] = opened.loads
    return {name: distribution(found) for name, found in values.items() if found}


def _gap_percentiles(samples: Sequence[Sample]) -> tuple[float, ...]:
    gaps = [gap for sample in samples for gap in sample.values("itl")]
    return tuple(np.percentile(gaps, range(101)).tolist()) if gaps else ()


def _roofline(trial: Trial, facts: Mapping[str, Any], outcome: Outcome) -> Roofline | None:
    """Return the roofline of a trial, or None if the trial failed or did not run on this machine's CPU.

    Concurrent requests share each read of the weights, so shares are reported only for a concurrency of 1.
    """
    if not outcome.bandwidths or "weight_bytes" not in facts or facts.get("gpu_layers"):
        return None
    workload = trial.configuration.workload.facts
    requests = [request for sample in trial.samples for request in sample.requests]
    if not requests:
        return None
    bandwidth, multiply_rate = statistics.median(outcome.bandwidths), max(outcome.multiply_rates)
    reached = {name: statistics.median(found) for name in JUDGED if (found := samples_of(trial, name))}
    # Decode reads the KV cache up to the current position. On average, that position is the middle of the answer.
    held = statistics.mean(request.prompt_tokens + request.generated_tokens / 2 for request in requests)
    windows = facts.get("kv_bytes_per_token_of_window", {})
    kv_read = KVBytes(
        facts["kv_bytes_per_token"],
        tuple((int(tokens), windows[tokens]) for tokens in windows),
        facts.get("state_bytes_per_token", 0),
    )
    # A step reads the weights once, but with speculation, the step may generate several tokens.
    steps = sum(request.steps for request in requests)
    tokens_per_step = sum(request.generated_tokens for request in requests) / steps if steps else 1.0
    token_bytes = (facts["weight_bytes"] + kv_read.of(held)) / tokens_per_step
    is_alone = workload.concurrency == 1
    return Roofline(
        read_bandwidth=bandwidth,
        multiply_rate=multiply_rate,
        bytes_per_token=token_bytes,
        products_per_token=facts["prefill_products"],
        decode_share=reached["decode"] * token_bytes / bandwidth if "decode" in reached and is_alone else None,
        prefill_share=reached["prefill"] * facts["prefill_products"] / multiply_rate
        if "prefill" in reached and is_alone
        else None,
    )
