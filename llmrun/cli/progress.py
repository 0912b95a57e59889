"""What is said while the user waits."""

from __future__ import annotations

import time

from llmrun.cli.output import out

_BAR = 20  # columns


class HubReporter:
    """Shows the hub's work: notes as they are, downloads as a bar with speed and time left."""

    def __init__(self) -> None:
        self._label = ""
        self._started = 0.0
        self._first = 0

    def note(self, line: str) -> None:
        out.note(line)

    def progress(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label != self._label:
            self._label, self._started, self._first = label, now, done
        if done >= total:
            out.clear_progress()
            self._label = ""
            return
        out.progress(download_line(label, done, total, done - self._first, now - self._started))


def download_line(label: str, done: int, total: int, fetched: int, seconds: float) -> str:
    """`smollm2:135m  ████████░░░░░░░░░░░░  41%  40.3/98.4 MB  12.1 MB/s  0:04 left`.

    `fetched` of the `done` bytes came in the last `seconds`; the rest was there before.
    """
    fraction = done / total if total else 0.0
    line = f"{label}  {progress_bar(fraction)}  {fraction:.0%}  {done / 1e6:.1f}/{total / 1e6:.1f} MB"
    if fetched <= 0 or seconds < 0.5:
        return line
    speed = fetched / seconds
    left = int((total - done) / speed)
    return f"{line}  {speed / 1e6:.1f} MB/s  {left // 60}:{left % 60:02d} left"


def progress_bar(fraction: float) -> str:
    """`████████░░░░░░░░░░░░`"""
    filled = round(fraction * _BAR)
    return "█" * filled + "░" * (_BAR - filled)


def show_loading(what: str, fraction: float) -> None:
    """The engine's progress while it opens a model."""
    out.progress(f"{what}  {fraction:.0%}")
