"""The rows that scripts/check-gpu prints, and the steps that produce them. A step that fails becomes a row."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmrun.base.errors import LlmrunError

State = TypeVar("State")

HEADINGS = ("check", "setting", "result", "wanted", "passed")
_WORDS = {True: "yes", False: "**no**", None: ""}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `passed` is None if there is nothing to pass."""

    check: str
    setting: str
    result: str
    wanted: str = ""
    passed: bool | None = None


class StepFailed(Exception):
    """A command of a step failed, or there was no time for it."""


class Clock:
    """Counts the time that is left for all steps."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + seconds

    def left(self) -> float:
        return self._end - self._now()

    def limit(self, most: float) -> float:
        """Return the time limit for a command that may take `most` seconds. Raises StepFailed if no time is left."""
        if (left := self.left()) < 1:
            raise StepFailed("no time is left; raise --minutes")
        return min(most, left)


def rows_of(steps: Mapping[str, Callable[[State], Iterable[Row]]], state: State) -> Iterator[Row]:
    """Run each step, and yield its rows as soon as they are known. Failures do not stop later steps."""
    for name, step in steps.items():
        try:
            yield from step(state)
        except (StepFailed, LlmrunError, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            words = str(error) if isinstance(error, StepFailed | LlmrunError) else f"{type(error).__name__}: {error}"
            yield Row(name, "", f"failed: {' '.join(words.split())[:300]}", passed=False)


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield _line(HEADINGS)
    yield _line(["---"] * len(HEADINGS))
    for row in rows:
        yield _line((row.check, row.setting, row.result, row.wanted, _WORDS[row.passed]))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
