"""Tests of a download's progress line: amount, speed and remaining time at any width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.console import progress
from llmrun.cli.console.progress import HubReporter, download_line
from llmrun.cli.console.terminal import width

BAR = "████████░░░░░░░░░░░░"


def test_a_download_shows_how_far_how_fast_and_how_long() -> None:
    assert download_line("m", 40_000_000, 100_000_000, 0, 0.0) == f"m  {BAR}  40%  40.0/100.0 MB"
    assert download_line("m", 40_000_000, 100_000_000, 20_000_000, 2.0) == (
        f"m  {BAR}  40%  40.0/100.0 MB  10.0 MB/s  0:06 left"
    )
    assert download_line("m", 4 * 10**10, 10**11, 10**7, 10.0, 200) == (
        f"m  {BAR}  40%  40.00/100.00 GB  1.00 MB/s  16:40:00 left"
    )


def test_nothing_of_nothing_is_no_division() -> None:
    assert "0%" in download_line("m", 0, 0, 0, 0.0)


def test_all_of_it_is_said_only_of_all_of_it() -> None:
    assert " 99%  " in download_line("m", 999_999, 1_000_000, 0, 0.0)


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (100, f"downloading hf:o/Model-Q8_0  {BAR}  40%  40.0/100.0 MB  10.0 MB/s  0:06 left"),
        (80, f"…hf:o/Model-Q8_0  {BAR}  40%  40.0/100.0 MB  10.0 MB/s  0:06 left"),
        (79, f"…f:o/Model-Q8_0  {BAR}  40%  40.0/100.0 MB  10.0 MB/s  0:06 left"),
        (72, "downloading hf:o/Model-Q8_0  40%  40.0/100.0 MB  10.0 MB/s  0:06 left"),
        (60, "…/Model-Q8_0  40%  40.0/100.0 MB  10.0 MB/s  0:06 left"),
        (40, "40%  40.0/100.0 MB  10.0 MB/s  0:06 left"),
    ],
)
def test_where_room_is_short_the_figures_stay(limit: int, line: str) -> None:
    got = download_line("downloading hf:o/Model-Q8_0", 40_000_000, 100_000_000, 20_000_000, 2.0, limit)
    assert width(got) <= limit
    assert got.split("  ")[-3:] == line.split("  ")[-3:]
    assert (BAR in got) == (BAR in line)


@given(st.text(min_size=1, max_size=80, alphabet=st.characters(codec="ascii")), st.integers(45, 200))
def test_a_line_is_never_wider_than_its_room(label: str, limit: int) -> None:
    assert width(download_line(label, 40_000_000, 100_000_000, 20_000_000, 2.0, limit)) <= limit


class Screen:
    """A stand-in for `out` and for the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.lines, self.cleared = 0.0, list[str](), 0
        monkeypatch.setattr(progress, "out", self)
        monkeypatch.setattr("llmrun.cli.console.progress.time.monotonic", lambda: self.now)

    def progress(self, text: str) -> None:
        self.lines.append(text)

    def clear_progress(self) -> None:
        self.cleared += 1

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_what_was_there_before_does_not_count_for_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, reporter = Screen(monkeypatch), HubReporter()
    reporter.progress("m", 90_000_000, 100_000_000)
    assert "/s" not in screen.lines[-1]
    screen.now = 2.0
    reporter.progress("m", 92_000_000, 100_000_000)
    assert screen.lines[-1].endswith("1.00 MB/s  0:08 left")


def test_speed_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, reporter = Screen(monkeypatch), HubReporter()
    done = 0
    for second in range(120):
        screen.now = float(second)
        done += 10_000_000 if second < 60 else 1_000_000  # the download slows down
        reporter.progress("m", done, 10**9)
    assert " 1.00 MB/s" in screen.lines[-1]


def test_a_new_label_begins_anew_and_the_end_clears_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, reporter = Screen(monkeypatch), HubReporter()
    reporter.progress("m (1 of 2)", 10, 20)
    screen.now = 1.0
    reporter.progress("m (1 of 2)", 20, 20)
    assert screen.cleared == 1
    reporter.progress("m (2 of 2)", 10_000_000, 20_000_000)
    assert "/s" not in screen.lines[-1]
    reporter.note("so it is")
    assert screen.lines[-1] == "so it is"
