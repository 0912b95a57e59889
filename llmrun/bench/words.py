"""The words of a benchmark: numbers with few digits, names that tell configurations apart, and verdicts as sentences.

For every output, so that the table in a terminal and the page in a browser say the same.
"""

from __future__ import annotations

import math
from dataclasses import replace

from llmrun.bench.document import Document, Verdict
from llmrun.bench.metrics import METRICS, Metric

_NOT_A_NUMBER = "–"


def number_words(value: float) -> str:
    """Three digits or all before the point: 0.912, 9.12, 92.0, 311, 1,235."""
    if not math.isfinite(value):
        return _NOT_A_NUMBER
    size = abs(value)
    if size >= 1e9 or 0 < size < 0.001:
        return f"{value:.3g}"
    if size >= 99.95 or size == 0:
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 9.995 else 2 if size >= 0.9995 else 3}f}"


def seconds_words(seconds: float) -> str:
    """Three digits in the unit that suits: 840 µs, 8.30 ms, 1.51 s, 2 min 04 s."""
    if not math.isfinite(seconds):
        return _NOT_A_NUMBER
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.0009995:
        return f"{number_words(seconds * 1e6)} µs"
    if size < 0.9995:
        return f"{number_words(seconds * 1e3)} ms"
    if size < 99.95:
        return f"{number_words(seconds)} s"
    return f"{round(seconds) // 60:,} min {round(seconds) % 60:02d} s"


def memory_words(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB" if math.isfinite(n_bytes) else _NOT_A_NUMBER


def percent_words(share: float) -> str:
    """Two digits or more: 5.1 %, 74 %."""
    if not math.isfinite(share):
        return _NOT_A_NUMBER
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:,.0f} %"


def metric_of(name: str) -> Metric:
    """The metric of that name; one that a later llmrun wrote goes by its name alone."""
    return METRICS.get(name) or Metric(name, name, False, "")


def metric_unit(name: str) -> str:
    """`tok/s` or `requests/s`; empty for times, which bring their own, and for what is not known here."""
    if name == "requests":
        return "requests/s"
    return "tok/s" if metric_of(name).is_speed else ""


def metric_words(name: str, value: float) -> str:
    """A figure with its unit: `92.0 tok/s`, `8.30 ms`."""
    if name in METRICS and not METRICS[name].is_speed:
        return seconds_words(value)
    return f"{number_words(value)} {metric_unit(name)}".rstrip()


def result_names(document: Document) -> tuple[str, ...]:
    """A name for each result that says what tells it from the others: `cpu · 512 in, 128 out`."""
    varies = _workloads_vary(document)
    return tuple(
        f"{one.subject.name} · {one.workload.label}" if varies else one.subject.name for one in document.results
    )


def verdict_sentence(document: Document, verdict: Verdict) -> str:
    """`cpu is 1.84x as fast as llama in decode (99 %: 1.79 to 1.90)`: the faster one first."""
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
    interval = f"{verdict.level * 100:g} %: {verdict.low:,.{digits}f} to {verdict.high:,.{digits}f}"
    said = f"({'; '.join([*common, interval])})"
    if verdict.is_different:
        return f"{one} is {verdict.ratio:,.{digits}f}x as fast as {other} in {metric} {said}"
    return f"no difference shown between {one} and {other} in {metric} {said}"


def _faster_first(verdict: Verdict) -> Verdict:
    """Turned round where it says that one is slower; not one of a document that no benchmark wrote (0, infinity)."""
    values = (verdict.high, verdict.ratio, verdict.low)
    if not verdict.is_different or verdict.ratio >= 1 or not all(1e-9 < value < 1e9 for value in values):
        return verdict
    low, ratio, high = (1 / value for value in values)
    return replace(verdict, of=verdict.against, against=verdict.of, low=low, ratio=ratio, high=high)


def _workloads_vary(document: Document) -> bool:
    return len({one.workload.label for one in document.results}) > 1


def _digits_that_show_it(verdict: Verdict) -> int:
    """Two after the point, but more where a bound that is not 1 would be written as 1.00."""
    for digits in (2, 3, 4):
        if not verdict.is_different or 1.0 not in (round(verdict.low, digits), round(verdict.high, digits)):
            return digits
    return 5
