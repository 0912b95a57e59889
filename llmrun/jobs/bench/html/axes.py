"""Computes the range and the ticks of chart axes, and the positions of values on them in percent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Values outside this range are not drawn. No benchmark measures such values, and a damaged document must not produce an
# axis of a thousand decades.
_LEAST, _MOST = 1e-12, 1e12
_DECADES = 4  # The maximum number of decades on a logarithmic axis. Smaller values are drawn at its left end.


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick with its label. `at` is its position in percent of the axis."""

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
        """Return the position of a value in percent, 0 to 100. Values outside the axis are clamped to its ends."""
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
    """Return an axis without ticks, and the range of n for which n * step is on the axis."""
    fine = step / 10
    axis = Axis(math.floor(low / fine + 1e-9) * fine, math.ceil(high / fine - 1e-9) * fine, ())
    return axis, range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)


def spread_axis(values: Iterable[float], most_ticks: int) -> Axis:
    """Return an axis for a distribution. It is logarithmic if the largest value is at least 10 times the smallest."""
    used = sorted(values)
    high = used[-1]
    low = max(next((value for value in used if value > 0), high), high / 10**_DECADES)
    if high <= 0 or high < 10 * low:
        return linear_axis(used[0], high, min(most_ticks, 5))
    bottom, top = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    low, high = _one_two_five_below(low), _one_two_five_above(high)
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


def _one_two_five_above(value: float) -> float:
    return _round_step(value)


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
