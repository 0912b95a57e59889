"""Computes line charts of the distribution of latencies and of the number of tokens over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from llmrun.base.amounts import format_seconds
from llmrun.jobs.bench.documents.document import Document
from llmrun.jobs.bench.documents.words import result_names
from llmrun.jobs.bench.html.axes import Axis, Tick, drawable, linear_axis, spread_axis, time_unit
from llmrun.jobs.bench.html.bars import MOST_COLORS, color_of

FEWEST_FOR_A_CURVE = 10  # With fewer samples than this, a curve would suggest more precision than the data has.
_MOST_POINTS = 400  # The maximum number of points per curve. No screen shows more.
_SHARE_TICKS = (Tick(0.0, "0%"), Tick(50.0, "50%"), Tick(100.0, "100%"))


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart.

    points  x,y pairs for an SVG polyline, in percent from the upper left corner
    mark    the position of a dot on the curve
    """

    name: str
    color: int
    points: str
    note: str
    mark: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class CurveChart:
    """A line chart.

    All curves share one panel. If there are more curves than distinct colors, each curve gets its own panel, with the
    others in the background.
    """

    key: str  # the HTML id
    title: str
    across: str
    upwards: str
    across_ticks: tuple[Tick, ...]
    upwards_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    is_logarithmic: bool = False

    @property
    def has_panels(self) -> bool:
        """True if each curve gets its own panel."""
        return len(self.curves) > MOST_COLORS


@dataclass(frozen=True, slots=True)
class _Line:
    """A curve in data units: x in seconds, y in percent or tokens."""

    name: str
    color: int
    points: Sequence[tuple[float, float]]
    note: str


def gap_chart(document: Document) -> CurveChart | None:
    """Return the cumulative distribution of inter-token latencies, or None if there is nothing to draw."""
    lines = []
    for index, result in enumerate(document.results):
        gaps = result.gaps
        if len(gaps) < 2 or not all(map(drawable, gaps)):
            continue
        points = [(gap, 100 * place / (len(gaps) - 1)) for place, gap in enumerate(gaps)]
        note = f"median {format_seconds(_percentile(gaps, 50))}, 99% within {format_seconds(_percentile(gaps, 99))}"
        lines.append(_Line(result_names(document)[index], color_of(document, index), points, note))
    return _distribution("gaps", "inter-token latency", lines)


def first_token_chart(document: Document) -> CurveChart | None:
    """Return the cumulative distribution of the time to first token, or None if there are too few samples."""
    lines = []
    for index, result in enumerate(document.results):
        samples = sorted(result.samples.get("ttft", ()))
        if len(samples) < FEWEST_FOR_A_CURVE or not all(map(drawable, samples)):
            continue
        points = [(samples[0], 0.0)]
        for place, sample in enumerate(samples):
            points += [(sample, 100 * place / len(samples)), (sample, 100 * (place + 1) / len(samples))]
        note = f"median {format_seconds(median(samples))}"
        lines.append(_Line(result_names(document)[index], color_of(document, index), points, note))
    return _distribution("first", "time to first token", lines)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[round((len(ordered) - 1) * percent / 100)]


def _distribution(key: str, title: str, lines: Sequence[_Line]) -> CurveChart | None:
    if not lines:
        return None
    factor, unit = time_unit(max(x for line in lines for x, _ in line.points))
    in_panels = len(lines) > MOST_COLORS
    axis = spread_axis((x * factor for line in lines for x, _ in line.points), 3 if in_panels else 7)
    upwards = linear_axis(0, 100)
    return CurveChart(
        key=key,
        title=title,
        across=unit,
        upwards="cumulative share",
        across_ticks=axis.ticks,
        upwards_ticks=_SHARE_TICKS,
        curves=tuple(_drawn(line, factor, axis, upwards) for line in lines),
        is_logarithmic=axis.is_logarithmic,
    )


def token_chart(document: Document) -> CurveChart | None:
    """Return the number of tokens over time for a typical request. A dot marks the first token."""
    lines = []
    for index, result in enumerate(document.results):
        line = [(at, float(tokens)) for at, tokens in result.timeline]
        if not line or not all(drawable(at) and drawable(tokens) for at, tokens in line):
            continue
        note = f"first token after {format_seconds(line[0][0])}"
        lines.append(_Line(result_names(document)[index], color_of(document, index), line, note))
    if not lines:
        return None
    factor, unit = time_unit(max(x for line in lines for x, _ in line.points))
    most_ticks = 3 if len(lines) > MOST_COLORS else 5
    axis = linear_axis(0, factor * max(x for line in lines for x, _ in line.points), most_ticks)
    upwards = linear_axis(0, max(y for line in lines for _, y in line.points), most_ticks)
    return CurveChart(
        key="tokens",
        title="a typical request",
        across=unit,
        upwards="tokens",
        across_ticks=axis.ticks,
        upwards_ticks=upwards.ticks,
        curves=tuple(_drawn_from_zero(line, factor, axis, upwards) for line in lines),
    )


def _drawn(line: _Line, factor: float, axis: Axis, upwards: Axis) -> Curve:
    points = [(axis.place(x * factor), round(100 - upwards.place(y), 2)) for x, y in _thinned(line.points)]
    return Curve(line.name, line.color, " ".join(f"{x:g},{y:g}" for x, y in points), line.note)


def _drawn_from_zero(line: _Line, factor: float, axis: Axis, upwards: Axis) -> Curve:
    """Return a curve that starts at zero and stays there until the first token."""
    first, tokens = line.points[0]
    waited = _Line(line.name, line.color, [(0.0, 0.0), (first, 0.0), *line.points], line.note)
    curve = _drawn(waited, factor, axis, upwards)
    mark = axis.place(first * factor), round(100 - upwards.place(tokens), 2)
    return Curve(curve.name, curve.color, curve.points, curve.note, mark)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    stride = math.ceil(len(points) / (_MOST_POINTS - 1))
    return [*points[::stride], points[-1]]
