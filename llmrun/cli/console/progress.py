"""What is said while the user waits."""

from __future__ import annotations

import time
from collections import deque

from llmrun.amounts import format_bytes, format_bytes_done, format_clock
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import columns, width

_BAR = 20  # columns
_SHORTEST_LABEL = 12
_WINDOW_S = 8.0  # speed and time left follow the last seconds, not what was an hour ago


class HubReporter:
    """Shows the hub's work: notes as they are, downloads as a bar with speed and time left."""

    def __init__(self) -> None:
        self._label = ""
        self._seen: deque[tuple[float, int]] = deque()  # (seconds, bytes done), the last ones

    def note(self, line: str) -> None:
        out.note(line)

    def progress(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label != self._label:
            self._label = label
            self._seen.clear()
        if done >= total:
            out.clear_progress()
            self._label = ""
            return
        first, then = self._recent(now, done)
        out.progress(download_line(label, done, total, done - then, now - first, columns() - 1))

    def _recent(self, now: float, done: int) -> tuple[float, int]:
        """The oldest moment of the window, and what was done then: what was there at the start is not fetched."""
        if not self._seen or now - self._seen[-1][0] >= _WINDOW_S / 40:
            self._seen.append((now, done))
        while now - self._seen[0][0] > _WINDOW_S and len(self._seen) > 1:
            self._seen.popleft()
        return self._seen[0]


def download_line(label: str, done: int, total: int, fetched: int, seconds: float, limit: int = 100) -> str:
    """`smollm2:135m  ████████░░░░░░░░░░░░  41%  40.3/98.4 MB  12.1 MB/s  0:04 left`, in at most `limit` columns.

    `fetched` of the `done` bytes came in the last `seconds`; the rest was there before. Where there is too little room
    the bar gets shorter, the label loses its beginning (names differ at their ends), then the bar goes: what is asked
    is how long yet.
    """
    fraction = done / total if total else 0.0
    # Rounded down: 100 % is only said of what is all there.
    figures = f"{int(fraction * 100)}%  {format_bytes_done(done, total)}"
    if fetched > 0 and seconds >= 0.5:
        speed = fetched / seconds
        figures += f"  {format_bytes(speed)}/s  {format_clock((total - done) / speed)} left"
    with_bars = [f"{progress_bar(fraction, columns)}  {figures}" for columns in (_BAR, _BAR // 2)]
    for right in with_bars:
        if width(label) + 2 + width(right) <= limit:
            return f"{label}  {right}"
    for right in (*with_bars, figures):
        room = limit - width(right) - 2
        if width(label) <= room:
            return f"{label}  {right}"
        if room >= _SHORTEST_LABEL:
            return f"…{label[1 - room :]}  {right}"
    return figures


def progress_bar(fraction: float, columns: int = _BAR) -> str:
    """`████████░░░░░░░░░░░░`"""
    filled = int(fraction * columns)
    return "█" * filled + "░" * (columns - filled)


def show_loading(what: str, fraction: float) -> None:
    """The engine's progress while it opens a model."""
    out.progress(f"{what}  {fraction:.0%}")
