"""Formats metrics, names of configurations and verdicts as text.

All outputs use these functions, so that the table in the terminal and the HTML page agree.
"""

from __future__ import annotations

from dataclasses import replace

from llmrun.base.amounts import counted, format_number, format_seconds
from llmrun.jobs.bench.documents.document import Document, Verdict
from llmrun.jobs.bench.documents.metrics import METRICS, Metric


def metric_of(name: str) -> Metric:
    """Return the metric with this name, or one with only its name filled in if the metric is unknown."""
    return METRICS.get(name) or Metric(name, name, False, "")


def metric_unit(name: str) -> str:
    """Return `tok/s` or `requests/s`. Return "" for unknown metrics, and for times, whose values include the unit."""
    if name == "requests":
        return "requests/s"
    return "tok/s" if metric_of(name).is_speed else ""


def metric_words(name: str, value: float) -> str:
    """Format a value with its unit, such as `92.0 tok/s` or `8.30 ms`."""
    if name in METRICS and not METRICS[name].is_speed:
        return format_seconds(value)
    return f"{format_number(value)} {metric_unit(name)}".rstrip()


def result_names(document: Document) -> tuple[str, ...]:
    """Return a unique name for each result, such as `cpu · 512 in, 128 out`."""
    varies = _workloads_vary(document)
    return tuple(
        f"{one.subject.name} · {one.workload.label}" if varies else one.subject.name for one in document.results
    )


def verdict_sentence(document: Document, verdict: Verdict) -> str:
    """Format a verdict: `cpu is 1.84x as fast as llama in decode (99%: 1.79 to 1.90)`. The faster side comes first."""
    verdict = _faster_first(verdict)
    first, second = document.results[verdict.of], document.results[verdict.against]
    one, other = first.subject.name, second.subject.name
    common = []
    if first.workload != second.workload:
        one, other = f"{one} · {first.workload.label}", f"{other} · {second.workload.label}"
    elif _workloads_vary(document):
        common = [first.workload.label]
    metric = metric_of(verdict.metric).words
    digits = _digits_that_show_it(verdict)
    interval = f"{verdict.level * 100:g}%: {verdict.low:,.{digits}f} to {verdict.high:,.{digits}f}"
    said = f"({'; '.join([*common, interval])})"
    if verdict.is_different:
        return f"{one} is {verdict.ratio:,.{digits}f}x as fast as {other} in {metric} {said}"
    return f"no significant difference between {one} and {other} in {metric} {said}"


def answer_sentences(document: Document) -> list[str]:
    """Format the comparisons of answers with and without speculation, for all workloads together."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for check in document.answer_checks:
        names = document.results[check.of].subject.name, document.results[check.against].subject.name
        answers, different = totals.get(names, (0, 0))
        totals[names] = answers + check.answers, different + check.different
    return [_answer_sentence(*names, *counts) for names, counts in totals.items()]


def _answer_sentence(one: str, other: str, answers: int, different: int) -> str:
    if answers == 1:
        return f"{one}: the answer {'differs from' if different else 'equals'} that of {other}"
    if different:
        return f"{one}: {different:,} of {counted(answers, 'answer')} differ from those of {other}"
    return f"{one}: all {counted(answers, 'answer')} equal those of {other}"


def _faster_first(verdict: Verdict) -> Verdict:
    """Swap the two sides of a verdict if the first is slower.

    If a value has no finite inverse, the verdict is returned unchanged. No benchmark produces such extreme values.
    """
    values = (verdict.high, verdict.ratio, verdict.low)
    if not verdict.is_different or verdict.ratio >= 1 or not all(1e-9 < value < 1e9 for value in values):
        return verdict
    low, ratio, high = (1 / value for value in values)
    return replace(verdict, of=verdict.against, against=verdict.of, low=low, ratio=ratio, high=high)


def _workloads_vary(document: Document) -> bool:
    return len({one.workload.label for one in document.results}) > 1


def _digits_that_show_it(verdict: Verdict) -> int:
    """Return the number of decimals to show: 2, or more if a bound other than 1 would be rounded to 1.00."""
    for digits in (2, 3, 4):
        if not verdict.is_different or 1.0 not in (round(verdict.low, digits), round(verdict.high, digits)):
            return digits
    return 5
