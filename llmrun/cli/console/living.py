"""A progress line. A thread redraws it, because a single forward pass of a large model can take a minute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from llmrun.cli.console.output import out
from llmrun.cli.console.progress import progress_bar

_REDRAW_S = 0.2


class LiveReporter:
    """A bench.reporter.Reporter for any job. Nothing else may write to the terminal inside its `with` block."""

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

    def __enter__(self) -> LiveReporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        out.clear_progress()

    def _redraw(self) -> None:
        while not self._over.wait(_REDRAW_S):
            with self._lock:
                if words := self._words():
                    out.progress(words)
