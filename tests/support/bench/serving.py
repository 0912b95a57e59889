"""Records of requests for tests of the serving benchmark, and a reporter that says nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmrun.engine.remote.stream import Usage
from llmrun.jobs.bench.serving.driving import Try
from llmrun.jobs.bench.serving.record import Record


def record(
    due: float = 0.0,
    moments: Sequence[float] = (1.0,),
    *,
    group: str = "",
    number: int = 0,
    problem: str = "",
    usage: Usage | None = None,
    tries: Sequence[Try] = (),
) -> Record:
    """Return a request that was sent when it was due."""
    ended = moments[-1] if moments else due
    status = int(problem.removeprefix("HTTP ")) if problem.startswith("HTTP ") else 200
    return Record(
        group=group,
        number=number,
        due=due,
        sent=due,
        moments=() if problem else tuple(moments),
        ended=ended,
        problem=problem,
        words="",
        usage=usage,
        tries=tuple(tries) or (Try(due, ended, status, None),),
    )


def accepted(sent: float) -> Try:
    return Try(sent, sent, 200, None)


def rejected(at: float, retry_after: float | None) -> Try:
    return Try(at, at, 429, retry_after)


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
