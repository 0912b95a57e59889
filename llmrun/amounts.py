"""Sizes, counts and times as people say them."""

from __future__ import annotations

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_AGES = ((60, "minute"), (3600, "hour"), (86_400, "day"), (7 * 86_400, "week"), (365 * 86_400, "year"))


def bytes_in_words(count: float) -> str:
    """`98.4 MB`, `2.50 GB`, `771 MB`: three digits, decimal units, as disks and memory are sold."""
    for size, unit in _UNITS:
        if count >= 0.9995 * size:
            number = count / size
            digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
            return f"{number:,.{digits}f} {unit}"
    return f"{count:.0f} B"


def tokens_in_words(count: int) -> str:
    """`8k` for 8192 tokens of context; "" for none."""
    if not count:
        return ""
    return f"{count // 1024}k" if count % 1024 == 0 and count < 1 << 20 else f"{count:,}"


def age_in_words(moment: float, now: float) -> str:
    """How long ago a moment was, both in seconds since 1970: `3 days ago`."""
    seconds = now - moment
    if seconds < 60:
        return "just now"
    size, unit = next((size, unit) for size, unit in reversed(_AGES) if seconds >= size)
    count = int(seconds // size)
    return f"{count} {unit}{'s' if count > 1 else ''} ago"


def counted(count: int, noun: str) -> str:
    """`1 model`, `2 models`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
