"""Shows the progress of downloads, prompts and long jobs on one line.

For prompts and jobs, a thread redraws the line, because a single forward pass of a large model can take a minute.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from llmrun.base.amounts import format_bytes, format_bytes_done, format_clock
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import columns, width

_BAR = 20  # width of a bar in columns
_SHORTEST_LABEL = 12
_WINDOW_S = 8.0  # the speed and the time left are computed over this period


class HubReporter:
    """Shows the hub's notes, and each download as a bar with its speed and the time left."""

    def __init__(self) -> None:
        self._label = ""
        self._seen: deque[tuple[float, int]] = deque()  # (time in seconds, bytes done), for the last _WINDOW_S seconds

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
        """Return the oldest time in the window and the number of bytes done at that time.

        The speed is computed from this point, so bytes that were already present at the start are not counted.
        """
        if not self._seen or now - self._seen[-1][0] >= _WINDOW_S / 40:
            self._seen.append((now, done))
        while now - self._seen[0][0] > _WINDOW_S and len(self._seen) > 1:
            self._seen.popleft()
        return self._seen[0]


def download_line(label: str, done: int, total: int, fetched: int, seconds: float, limit: int = 100) -> str:
    """Return `smollm2:135m  ████████░░░░░░░░░░░░  41%  40.3/98.4 MB  12.1 MB/s  0:04 left`.

    The line has at most `limit` columns. If there is not enough room, the bar is shortened first, then the label is cut
    at its start (because names differ at their ends), and then the bar is dropped. The numbers are always shown.

    done     number of bytes that are present
    fetched  number of bytes that arrived in the last `seconds`
    """
    fraction = done / total if total else 0.0
    # Round down, so that 100% appears only when the download is complete.
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
    """Return a bar such as `████████░░░░░░░░░░░░`."""
    filled = int(fraction * columns)
    return "█" * filled + "░" * (columns - filled)


_REDRAW_S = 0.2


class LiveReporter:
    """A BenchReporter for any job.

    Nothing else may write to the terminal until `end` is called or the `with` block ends.
    """

    def __init__(self) -> None:
        self._words: Callable[[], str] = str
        self._lock = threading.Lock()  # held while writing, because two threads write
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="llmrun-progress", daemon=True)

    def progress(self, words: str, share: float | None = None) -> None:
        self.watch(lambda: (words, share))

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None:
        def line() -> str:
            words, share = tell()
            return words if share is None else f"{progress_bar(share)}  {words}"

        self._words = line

    def note(self, words: str) -> None:
        with self._lock:
            out.note(words)

    def end(self) -> None:
        """Erase the line and stop redrawing it. Calls after the first have no effect."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            out.clear_progress()

    def __enter__(self) -> LiveReporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _redraw(self) -> None:
        while not self._over.wait(_REDRAW_S):
            with self._lock:
                if words := self._words():
                    out.progress(words)
