"""A living line while something works that never says how far it is."""

from __future__ import annotations

import threading
from types import TracebackType

from llmrun.cli.output import out

_EVERY_S = 0.1


class Waiting:
    """Inside, `doing` says what goes on; the line lives until the end. Nothing else may be written meanwhile."""

    def __init__(self) -> None:
        self._words = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        out.clear_progress()

    def doing(self, words: str) -> None:
        self._words = words

    def _tell(self) -> None:
        while not self._over.wait(_EVERY_S):
            out.progress(f"{self._words} …")
