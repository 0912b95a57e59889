"""Tests of the statistics of a whole chat."""

from __future__ import annotations

from dataclasses import replace

from llmrun.base.types import Timings
from llmrun.cli.chatting.actions import total_lines

ANSWER = Timings(0.0, 20, 0, 40, 0.1, 0.1, 1.0, 1.1, steps=40)


def test_drafts_are_counted_over_all_answers() -> None:
    drafted = replace(ANSWER, steps=10, drafted_tokens=40, accepted_tokens=30)
    assert total_lines([ANSWER, drafted])[-1] == "drafts      30 of 40 tokens accepted (75%), 1.60 tokens per step"


def test_answers_of_servers_do_not_count_as_steps() -> None:
    drafted = replace(ANSWER, steps=20, drafted_tokens=40, accepted_tokens=20)
    assert total_lines([replace(ANSWER, steps=0), drafted])[-1].endswith("2.00 tokens per step")


def test_without_drafts_there_is_nothing_to_tell() -> None:
    assert not any(line.startswith("drafts") for line in total_lines([ANSWER]))
