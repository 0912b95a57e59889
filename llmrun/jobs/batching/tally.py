"""Counts what a run has done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    """The counts of one run, which an interrupted run continues.

    lines      lines of the input that are not blank
    done       lines with a record, including those of earlier runs
    resumed    lines with a record of an earlier run
    failed     lines whose record is an error, including those of earlier runs
    copied     lines that got the answer to an equal line
    calls      calls that this run answered
    ignored    names of fields that had no effect
    prompt_tokens, cached_tokens, generated_tokens  of the calls that this run answered
    """

    lines: int = 0
    done: int = 0
    resumed: int = 0
    failed: int = 0
    copied: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ignored: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start the clock."""
        self.began = time.monotonic()

    def count(self, body: Mapping[str, Any]) -> None:
        """Count the tokens of an answer."""
        self.calls += 1
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens += _integer(usage.get("prompt_tokens"))
            self.generated_tokens += _integer(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            self.cached_tokens += _integer(details.get("cached_tokens")) if isinstance(details, dict) else 0

    @property
    def seconds(self) -> float:
        """Seconds since the first call of this run."""
        return time.monotonic() - self.began

    @property
    def per_second(self) -> float:
        """Lines that this run finishes in a second."""
        return (self.done - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """The predicted seconds until all lines are done, or None if it is too early to tell."""
        return (self.lines - self.done) / self.per_second if self.done > self.resumed else None

    @property
    def cached_share(self) -> float:
        """The share of the prompt tokens that were not computed, because they were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def _integer(value: Any) -> int:
    return value if type(value) is int else 0
