"""Formats numbers for people, such as sizes, counts, speeds, times and percentages, and parses durations.

All output uses these functions, so that the terminal, web pages and error messages agree.
"""

from __future__ import annotations

import math
import re

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_AGES = ((60, "minute"), (3600, "hour"), (86_400, "day"), (7 * 86_400, "week"), (365 * 86_400, "year"))
_DURATION_PARTS = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h|d|)", re.ASCII)
_UNIT_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 0.001,
    "": 1,
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": 86_400,
}
_NOT_A_NUMBER = "–"


def format_number(value: float) -> str:
    """Format a number with three significant digits, or with all of its integer digits if it has more than three.

    Examples: 0.912, 9.12, 92.0, 311, 1,235. NaN and infinity become a dash.
    """
    if not math.isfinite(value):
        return _NOT_A_NUMBER
    size = abs(value)
    if size >= 1e9 or 0 < size < 0.001:
        return f"{value:.3g}"
    if size >= 99.95 or size == 0:
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 9.995 else 2 if size >= 0.9995 else 3}f}"


def format_roughly(value: float) -> str:
    """Format a number with two significant digits, or with all of its integer digits if it has more than two.

    Examples: 0.031, 0.91, 9.1, 23, 1,235. NaN and infinity become a dash.
    """
    if not math.isfinite(value):
        return _NOT_A_NUMBER
    return f"{value:,.0f}" if abs(value) >= 9.95 or value == 0 else f"{value:#.2g}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 model`, `2 models`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_tokens(count: int) -> str:
    """Format a context size in tokens: `8k` for 8192, "" for 0."""
    if not count:
        return ""
    return f"{count // 1024}k" if count % 1024 == 0 and count < 1 << 20 else f"{count:,}"


def format_parameters(count: int) -> str:
    """Format a number of parameters: `135 million parameters`."""
    return f"{count / 1e6:,.0f} million parameters"


def format_weights(count: int) -> str:
    """Format a number of weights as in model names: `135M`, `4.02B`."""
    if count >= 999.5e6:
        return f"{count / 1e9:.{2 if count < 9.995e9 else 1 if count < 99.95e9 else 0}f}B"
    return f"{count / 1e6:,.0f}M"


# --- sizes ------------------------------------------------------------------------------------------------------------


def format_bytes(count: float) -> str:
    """Format a size with three significant digits and decimal units: `98.4 MB`, `2.50 GB`, `771 MB`.

    Disks and memory are sold in decimal units.
    """
    for size, unit in _UNITS:
        if count >= 0.9995 * size:
            number = count / size
            digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
            return f"{number:,.{digits}f} {unit}"
    return f"{count:.0f} B"


def format_bytes_done(done: int, total: int) -> str:
    """Format download progress: `40.3/98.4 MB`.

    Both numbers use the unit of the total. The number of decimals stays the same while `done` grows.
    """
    unit, name, digits = (1e9, "GB", 2) if total >= 1e9 else (1e6, "MB", 1)
    return f"{done / unit:.{digits}f}/{total / unit:.{digits}f} {name}"


def format_mebibytes(count: float) -> str:
    """Format an amount of memory that is requested or in use: `1,234 MiB`.

    llama.cpp and system monitors report memory in MiB.
    """
    return f"{count / 2**20:,.0f} MiB" if math.isfinite(count) else _NOT_A_NUMBER


# --- speeds and percentages -------------------------------------------------------------------------------------------


def format_bandwidth(bytes_per_second: float) -> str:
    """Format a memory bandwidth: `39.1 GB/s`."""
    return f"{format_number(bytes_per_second / 1e9)} GB/s"


def format_percent(share: float) -> str:
    """Format a fraction as a percentage with at least two digits: 5.1%, 74%."""
    if not math.isfinite(share):
        return _NOT_A_NUMBER
    return f"{share * 100:.1f}%" if abs(share) < 0.0995 else f"{share * 100:,.0f}%"


# --- times ------------------------------------------------------------------------------------------------------------


def format_seconds(seconds: float) -> str:
    """Format a duration with three significant digits in a suitable unit: 840 µs, 8.30 ms, 1.51 s, 2 min 04 s."""
    if not math.isfinite(seconds):
        return _NOT_A_NUMBER
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.0009995:
        return f"{format_number(seconds * 1e6)} µs"
    if size < 0.9995:
        return f"{format_number(seconds * 1e3)} ms"
    if size < 99.95:
        return f"{format_number(seconds)} s"
    return f"{round(seconds) // 60:,} min {round(seconds) % 60:02d} s"


def format_seconds_briefly(seconds: float) -> str:
    """Format a duration compactly with two or three digits: 840us, 8.3ms, 123ms, 1.51s, 2m04s."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f}ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f}ms"
    if seconds < 99.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    return f"{round(seconds) // 60}m{round(seconds) % 60:02d}s"


def format_seconds_roughly(seconds: float) -> str:
    """Format a duration for people, with two significant digits: 0.031 s, 9.1 s, 44 s, 2 min 04 s."""
    if seconds < 99.5:
        return f"{format_roughly(seconds)} s"
    return f"{round(seconds) // 60:,} min {round(seconds) % 60:02d} s"


def format_expected(seconds: float) -> str:
    """Format a predicted duration: about 12 s, about 4 min."""
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {max(seconds, 1):.0f} s"


def format_duration(seconds: float) -> str:
    """Return a duration in words, such as "5 minutes", in the largest unit that divides the duration."""
    for size, unit in ((3600, "hour"), (60, "minute")):
        if seconds >= size and seconds % size == 0:
            return counted(int(seconds // size), unit)
    return counted(round(seconds), "second")


def format_clock(seconds: float) -> str:
    """Format a countdown: `0:04`, `12:30`, `3:05:00`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_age(moment: float, now: float) -> str:
    """Format the time since a moment: `3 days ago`. Both arguments are seconds since 1970."""
    seconds = now - moment
    if seconds < 60:
        return "just now"
    size, unit = next((size, unit) for size, unit in reversed(_AGES) if seconds >= size)
    return f"{counted(int(seconds // size), unit)} ago"


def format_until(moment: float, now: float) -> str:
    """Format the time until a moment: `in 4 minutes`. Both arguments are seconds since 1970."""
    seconds = max(0, int(moment - now))
    size, unit = next(((size, unit) for size, unit in reversed(_AGES) if seconds >= size), (1, "second"))
    return f"in {counted(seconds // size, unit)}"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as "5m", "1h30m", "90" or "0.5s", or math.inf for a negative duration.

    The notation is Go's, which Ollama also uses. A number without a unit counts seconds. Raises ValueError.
    """
    sign, rest = (-1 if text.startswith("-") else 1), (text[1:] if text[:1] in ("-", "+") else text)
    parts = _DURATION_PARTS.findall(rest)
    if "".join(number + unit for number, unit in parts) != rest or not parts:
        raise ValueError(text)
    if len(parts) > 1 and any(not unit for _, unit in parts):
        raise ValueError(text)
    seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    return math.inf if sign < 0 else seconds
