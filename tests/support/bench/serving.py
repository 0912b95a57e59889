"""Records of requests for tests of the serving benchmark, and a reporter that says nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmrun.engine.remote.stream import Usage
from llmrun.jobs.bench.serving.record import Record


def record(
    due: float = 0.0, moments: Sequence[float] = (1.0,), *, problem: str = "", usage: Usage | None = None
) -> Record:
    """Return a request that was sent when it was due."""
    return Record(
        due=due,
        sent=due,
        moments=() if problem else tuple(moments),
        ended=moments[-1] if moments else due,
        problem=problem,
        words="",
        usage=usage,
    )


class Silent:
    """A reporter that keeps the last progress."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def progress(self, words: str, share: float | None = None) -> None:
        self.said.append(words)

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None:
        self.said.append(tell()[0])

    def note(self, words: str) -> None:
        self.said.append(words)
