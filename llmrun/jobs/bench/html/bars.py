"""Computes bar charts of each configuration's speed and its share of the machine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.base.amounts import format_bandwidth, format_number, format_percent
from llmrun.jobs.bench.documents.document import Document, Result
from llmrun.jobs.bench.documents.metrics import METRICS
from llmrun.jobs.bench.documents.words import metric_unit, metric_words, result_names
from llmrun.jobs.bench.html.axes import Axis, Tick, drawable, linear_axis

MOST_COLORS = 6  # More colors than this are hard to tell apart, so larger benchmarks use a single color.


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. `length`, `low` and `high` are in percent of the axis; `low` and `high` are the ends of the whisker."""

    name: str
    color: int
    length: float
    words: str
    detail: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """A bar chart. `limit` is the position of a line across all bars, in percent of the axis."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    limit: float | None = None


def color_of(document: Document, index: int) -> int:
    """Return the number of a configuration's color, 1 to MOST_COLORS, which is the same in all charts."""
    return index + 1 if len(document.results) <= MOST_COLORS else 1


def speed_charts(document: Document) -> list[BarChart]:
    """Return a chart for each measured speed. Total throughput gets a chart only if requests ran concurrently."""
    names = ["prefill", "decode"]
    if any(result.workload.concurrency > 1 for result in document.results):
        names.append("throughput")
    return [chart for name in names if (chart := _speed_chart(document, name))]


def _speed_chart(document: Document, metric: str) -> BarChart | None:
    measured = [(index, one) for index, one in enumerate(document.results) if _median(one, metric) is not None]
    if not measured:
        return None
    axis = linear_axis(0, max(max(_median(one, metric) or 0, *_samples(one, metric), 0) for _, one in measured))
    names = result_names(document)
    bars = [_speed_bar(names[index], color_of(document, index), one, metric, axis) for index, one in measured]
    return BarChart(METRICS[metric].words, metric_unit(metric), tuple(bars), axis.ticks)


def _speed_bar(name: str, color: int, result: Result, metric: str, axis: Axis) -> Bar:
    median = _median(result, metric) or 0.0
    samples = _samples(result, metric)
    detail = f"{name}: median {metric_words(metric, median)}"
    if len(samples) < 2:
        return Bar(name, color, axis.place(median), format_number(median), detail)
    low, high = min(samples), max(samples)
    detail += f", {len(samples)} repetitions from {format_number(low)} to {format_number(high)}"
    return Bar(name, color, axis.place(median), format_number(median), detail, axis.place(low), axis.place(high))


def _median(result: Result, metric: str) -> float | None:
    figure = result.figures.get(metric)
    return figure.median if figure and drawable(figure.median) else None


def _samples(result: Result, metric: str) -> Sequence[float]:
    return [value for value in result.samples.get(metric, ()) if drawable(value)]


@dataclass(frozen=True, slots=True)
class RooflineCharts:
    """Charts of the share of the machine's limits that each configuration reached.

    `without` names the configurations that were measured but have no roofline.
    """

    charts: tuple[BarChart, ...]
    limits: tuple[str, ...]
    without: tuple[str, ...]


def roofline_charts(document: Document) -> RooflineCharts:
    """Return the roofline charts for decode and prefill, and a description of the machine's limits."""
    names = result_names(document)
    decode, prefill = [], []
    limits: dict[str, None] = {}
    without = []
    for index, result in enumerate(document.results):
        roof = result.roofline
        if roof is None or (roof.decode_share is None and roof.prefill_share is None):
            if not result.failure:
                without.append(names[index])
            continue
        limits[
            f"{format_bandwidth(roof.read_bandwidth)} read from memory, "
            f"{format_number(roof.multiply_rate / 1e9)} billion int8 products per second"
        ] = None
        where = names[index], color_of(document, index)
        if roof.decode_share is not None:
            reached = format_bandwidth(roof.decode_share * roof.read_bandwidth)
            decode.append((*where, roof.decode_share, reached))
        if roof.prefill_share is not None:
            reached = f"{format_number(roof.prefill_share * roof.multiply_rate / 1e9)} billion products per second"
            prefill.append((*where, roof.prefill_share, reached))
    charts = [
        _share_chart("decode", "share of memory bandwidth", decode),
        _share_chart("prefill", "share of int8 peak", prefill),
    ]
    return RooflineCharts(tuple(chart for chart in charts if chart), tuple(limits), tuple(without))


def _share_chart(title: str, unit: str, shares: Sequence[tuple[str, int, float, str]]) -> BarChart | None:
    shares = [share for share in shares if drawable(share[2])]
    if not shares:
        return None
    axis = linear_axis(0, max(100.0, *(100 * share for _, _, share, _ in shares)))
    bars = [
        Bar(name, color, axis.place(100 * share), format_percent(share), f"{name}: {reached}, {format_percent(share)}")
        for name, color, share, reached in shares
    ]
    ticks = tuple(Tick(tick.at, f"{tick.label} %") for tick in axis.ticks)
    return BarChart(title, unit, tuple(bars), ticks, axis.place(100))
