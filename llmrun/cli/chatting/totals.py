"""The statistics for an entire chat, which /stats shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmrun.base.amounts import format_number, format_percent, format_seconds_briefly
from llmrun.base.types import Timings


@dataclass(slots=True)
class SessionTotals:
    """The timings of all answers that have at least one token."""

    answers: list[Timings] = field(default_factory=list)

    def add(self, timings: Timings) -> None:
        if timings.generated_tokens:
            self.answers.append(timings)

    def lines(self) -> list[str]:
        """Return the lines for /stats. Speeds and latencies are medians over all answers."""
        if not self.answers:
            return ["no answers yet"]
        prompts = sum(one.prompt_tokens for one in self.answers)
        cached = sum(one.cached_tokens for one in self.answers)
        speeds = [one.decode_per_second for one in self.answers if one.decode_s > 0]
        paces = [one.tpot_s for one in self.answers if one.decode_s > 0]
        lines = [
            f"answers     {len(self.answers)}",
            f"tokens in   {prompts - cached:,} computed, {cached:,} cached from earlier turns",
            f"tokens out  {sum(one.generated_tokens for one in self.answers):,}",
            f"time        {format_seconds_briefly(sum(one.total_s for one in self.answers))}",
            f"TTFT        {format_seconds_briefly(median(one.ttft_s for one in self.answers))} (median)",
        ]
        if speeds:
            pace = format_seconds_briefly(median(paces))
            lines.append(f"decode      {format_number(median(speeds))} tok/s, TPOT {pace} (medians)")
        return [*lines, *_draft_lines([one for one in self.answers if one.steps])]


def _draft_lines(answers: Sequence[Timings]) -> list[str]:
    drafted = sum(one.drafted_tokens for one in answers)
    accepted = sum(one.accepted_tokens for one in answers)
    if not drafted:
        return []
    of_step = sum(one.generated_tokens for one in answers) / sum(one.steps for one in answers)
    return [
        f"drafts      {accepted:,} of {drafted:,} tokens accepted ({format_percent(accepted / drafted)}), "
        f"{format_number(of_step)} tokens per step"
    ]


def median(values: Iterable[float]) -> float:
    """Return the median of one or more values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
