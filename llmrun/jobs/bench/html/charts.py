"""Computes the charts of the HTML page as plain values: the ticks of axes, and positions in percent of an axis.

Bar charts show each configuration's speed and its share of the machine's limits. A line chart shows the distribution of
inter-token latencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmrun.base.amounts import format_bandwidth, format_number, format_percent, format_seconds
from llmrun.jobs.bench.documents.document import METRICS, Document, Result, metric_unit, metric_words, result_names

# Values outside this range are not drawn. No benchmark measures such values, and a damaged document must not produce an
# axis of a thousand decades.
_LEAST, _MOST = 1e-12, 1e12
_DECADES = 4  # The maximum number of decades on a logarithmic axis. Values below the axis are drawn at its left end.


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis, with its label. `at` is the tick's position in percent of the axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value in percent, 0 to 100. Values outside the axis are moved to the nearest end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(100 * (value - low) / (high - low), 2)


def drawable(value: float) -> bool:
    """Return whether a chart can show this value."""
    return value == 0 or _LEAST <= value <= _MOST


def linear_axis(low: float, high: float, most_ticks: int = 5) -> Axis:
    """Return a linear axis with ticks at round numbers.

    The ends are rounded outwards to a tenth of the distance between ticks. If `low` equals `high`, the axis extends
    above that value.
    """
    if high - low <= max(abs(high), _LEAST) * 1e-9:
        high = low + (low or 1.0)
    step = _round_step((high - low) / most_ticks)
    axis, marks = _stepped(low, high, step)
    while len(marks) > most_ticks:
        step = _round_step(step * 1.01)
        axis, marks = _stepped(low, high, step)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return Axis(axis.low, axis.high, tuple(Tick(axis.place(n * step), _tick_words(n * step, digits)) for n in marks))


def _stepped(low: float, high: float, step: float) -> tuple[Axis, range]:
    """Return an axis without ticks, and the range of all n such that n * step is on the axis."""
    fine = step / 10
    axis = Axis(math.floor(low / fine + 1e-9) * fine, math.ceil(high / fine - 1e-9) * fine, ())
    return axis, range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)


def spread_axis(values: Sequence[float], most_ticks: int = 7) -> Axis:
    """Return an axis for a distribution: logarithmic if the largest value is at least 10 times the smallest."""
    used = sorted(values)
    high = used[-1]
    low = max(next((value for value in used if value > 0), high), high / 10**_DECADES)
    if high <= 0 or high < 10 * low:
        return linear_axis(used[0], high, min(most_ticks, 5))
    bottom, top = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    low, high = _one_two_five_below(low), _round_step(high)
    axis = Axis(low, high, (), True)
    for mantissas in ((1, 2, 5), (1,)):
        marks = [m * 10.0**power for power in range(bottom, top + 1) for m in mantissas]
        marks = [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]
        if len(marks) <= most_ticks:
            break
    else:
        marks = marks[:: math.ceil(len(marks) / most_ticks)]
    return Axis(low, high, tuple(Tick(axis.place(mark), f"{mark:g}") for mark in marks), True)


def _round_step(least: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((m * power for m in (1, 2, 5) if m * power >= least * (1 - 1e-9)), 10 * power)


def _one_two_five_below(value: float) -> float:
    above = _round_step(value)
    return above if above <= value * (1 + 1e-9) else 1 / _round_step(1 / value)


def _tick_words(value: float, digits: int) -> str:
    return f"{value:.3g}" if abs(value) >= 1e6 or digits > 4 else f"{value:,.{digits}f}"


def time_unit(longest: float) -> tuple[float, str]:
    """Return a unit that suits the longest time, as the number of units per second and the name (µs, ms or s)."""
    if longest < 0.002:
        return 1e6, "µs"
    return (1e3, "ms") if longest < 2 else (1.0, "s")


MOST_COLORS = 6  # More colors are hard to tell apart, so larger benchmarks use a single color.


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
    """Return a chart for each measured speed. Total throughput is charted only if requests ran concurrently."""
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
    bar = Bar(name, color, axis.place(median), format_number(median), f"{name}: median {metric_words(metric, median)}")
    if len(samples) < 2:
        return bar
    low, high = min(samples), max(samples)
    detail = f"{bar.detail}, {len(samples)} repetitions from {format_number(low)} to {format_number(high)}"
    return replace(bar, detail=detail, low=axis.place(low), high=axis.place(high))


def _median(result: Result, metric: str) -> float | None:
    figure = result.figures.get(metric)
    return figure.median if figure and drawable(figure.median) else None


def _samples(result: Result, metric: str) -> Sequence[float]:
    return [value for value in result.samples.get(metric, ()) if drawable(value)]


@dataclass(frozen=True, slots=True)
class RooflineCharts:
    """Charts that show how close each configuration came to the machine's limits.

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


_MOST_POINTS = 400  # The maximum number of points per curve. Screens cannot show more points.


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart. `points` are x,y pairs for an SVG polyline, in percent from the upper left corner."""

    name: str
    color: int
    points: str
    note: str


@dataclass(frozen=True, slots=True)
class GapChart:
    """The cumulative distribution of inter-token latencies of each configuration."""

    unit: str
    ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    is_logarithmic: bool


def gap_chart(document: Document) -> GapChart | None:
    """Return the chart of inter-token latencies.

    Returns None if no latencies exist, or if the configurations outnumber the distinct colors.
    """
    measured = [
        (index, one.gaps)
        for index, one in enumerate(document.results)
        if len(one.gaps) > 1 and all(map(drawable, one.gaps))
    ]
    if not measured or len(document.results) > MOST_COLORS:
        return None
    factor, unit = time_unit(max(max(gaps) for _, gaps in measured))
    axis = spread_axis([gap * factor for _, gaps in measured for gap in gaps])
    names = result_names(document)
    curves = [
        Curve(names[index], color_of(document, index), _points(gaps, factor, axis), _note(gaps))
        for index, gaps in measured
    ]
    return GapChart(unit, axis.ticks, tuple(curves), axis.is_logarithmic)


def _points(gaps: Sequence[float], factor: float, axis: Axis) -> str:
    last = len(gaps) - 1
    places = [*range(0, last, math.ceil(len(gaps) / _MOST_POINTS)), last]
    return " ".join(f"{axis.place(gaps[place] * factor):g},{round(100 - 100 * place / last, 2):g}" for place in places)


def _note(gaps: Sequence[float]) -> str:
    median, most = (gaps[round((len(gaps) - 1) * share)] for share in (0.5, 0.99))
    return f"median {format_seconds(median)}, 99% within {format_seconds(most)}"
