"""Reads files in which Linux describes the system."""

from __future__ import annotations

from pathlib import Path

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the driver is loaded, even if it does not work


def text_of(path: Path) -> str | None:
    """Return a system file's text without surrounding whitespace and NULs, or None if it is empty or unreadable."""
    try:
        return path.read_text("utf-8", "replace").strip(" \t\n\0") or None
    except OSError:
        return None


def number_of(path: Path) -> int | None:
    """Return the number in a file, or None if it has another text, such as "max", or cannot be read."""
    text = text_of(path) or ""
    return int(text) if text.isdecimal() and text.isascii() else None
