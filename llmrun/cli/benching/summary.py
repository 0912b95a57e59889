"""Selects and formats the metrics of a summary, for both the terminal and Markdown."""

from __future__ import annotations

from llmrun.base.amounts import format_number, format_percent, format_seconds
from llmrun.jobs.bench.documents.document import Document, Result
from llmrun.jobs.bench.documents.words import metric_of, metric_unit

_COLUMNS = ("load", "cold", "ttft", "prefill", "tpot", "decode", "e2e", "throughput", "requests")


def shown_metrics(document: Document) -> list[str]:
    """Return the metrics that were measured for at least one configuration. Throughput requires concurrent requests."""
    together = any(result.workload.concurrency > 1 for result in document.results)
    left_out = () if together else ("throughput", "requests")
    return [
        name for name in _COLUMNS if name not in left_out and any(name in result.figures for result in document.results)
    ]


def head_words(name: str) -> str:
    """Return the column heading of a metric, with the unit below it if the values are formatted without a unit."""
    return (
        f"{metric_of(name).words}\n{metric_unit(name)}"
        if name in ("prefill", "decode", "throughput")
        else metric_of(name).words
    )


def figure_words(result: Result, name: str) -> str:
    """Format the median of a metric, with its unit if it is a time. Empty if there is none."""
    if name not in result.figures:
        return ""
    figure = result.figures[name]
    if not metric_of(name).is_speed:
        return format_seconds(figure.median)
    return format_number(figure.median)


def draft_words(result: Result) -> tuple[str, str]:
    """Format the tokens per step and the share of drafted tokens that were accepted. Empty if unknown."""
    totals = result.totals
    of_step = None if totals is None else totals.tokens_per_step
    accepted = None if totals is None else totals.acceptance
    return "" if of_step is None else f"{of_step:.2f}", "" if accepted is None else format_percent(accepted)
