"""Axes of charts: which numbers they end at, where their ticks are, and the percent of the way a value lies at."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# What no benchmark measures is not drawn: a damaged document must not make an axis of a thousand decades.
_LEAST, _MOST = 1e-12, 1e12
_DECADES = 4  # of a logarithmic axis at most; what is smaller lies at its left end


@dataclass(frozen=True, slots=True)
class Tick:
    """`at`: percent of the axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 to 100 percent; at an end what is beyond it."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(100 * (value - low) / (high - low), 2)


def drawable(value: float) -> bool:
    return value == 0 or _LEAST <= value <= _MOST


def linear_axis(low: float, high: float, most_ticks: int = 5) -> Axis:
    """Ticks at round numbers; the ends as close to what is drawn as a tenth of a tick. Equal ends get room above."""
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
    """An axis without ticks, and the multiples of a step that lie on it."""
    fine = step / 10
    axis = Axis(math.floor(low / fine + 1e-9) * fine, math.ceil(high / fine - 1e-9) * fine, ())
    return axis, range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)


def spread_axis(values: Iterable[float], most_ticks: int) -> Axis:
    """For a distribution: logarithmic where the largest is ten times the smallest, or more."""
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
    """The smallest of 1, 2, 5 times a power of ten that is at least this."""
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
    """How many of the unit a second has, and its name: the one in which the longest time reads well."""
    if longest < 0.002:
        return 1e6, "µs"
    return (1e3, "ms") if longest < 2 else (1.0, "s")
