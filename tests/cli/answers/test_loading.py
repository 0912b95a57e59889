"""Tests of the progress line of a load, and of the stored durations of loads."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrun.cli.answers import loading
from llmrun.cli.answers.loading import ModelLoading
from llmrun.cli.console import output
from llmrun.cli.console.output import Output


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def last(self) -> str:
        return self.getvalue().rpartition("\r")[2].rstrip()


class Clock:
    """Replaces the module `time` of the line and of the output. The line takes no time to draw."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loading, "time", clock)
    monkeypatch.setattr(output, "time", clock)
    return clock


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Screen:
    screen = Screen()
    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100", "LLMRUN_CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loading, "out", Output())
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=screen, stderr=screen))  # pytest replaces sys.stderr
    return screen


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(bytes(2_500_000))
    return path


def load(model: Path, clock: Clock, seconds: float, *words: str) -> None:
    """Load a model, which takes `seconds` and reports these words."""
    line = ModelLoading("small", model)
    line.begin()
    clock.now += seconds
    for what in words:
        line(what, 0.5)
    line.end()


def begun(model: Path, screen: Screen) -> str:
    ModelLoading("small", model).begin()
    return screen.last()


def test_the_line_shows_name_and_size_at_once(model: Path, screen: Screen, clock: Clock) -> None:
    assert begun(model, screen) == "loading small (2.50 MB) ..."


def test_the_line_says_how_long_the_last_load_took(model: Path, screen: Screen, clock: Clock) -> None:
    load(model, clock, 130)
    load(model, clock, 2.14, "loading weights")
    assert screen.last() == ""
    assert begun(model, screen) == "loading small (2.50 MB, 2.1 s last time) ..."


def test_progress_keeps_the_name_where_it_fits(
    model: Path, screen: Screen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ModelLoading("small", model)
    line.begin()
    clock.now += 1
    line("loading weights", 0.5)
    assert screen.last() == "loading small (2.50 MB)  50%"
    clock.now += 1
    line("compiling kernels 3/40, only once, about 20 s left", 0.075)
    assert screen.last() == "small: compiling kernels 3/40, only once, about 20 s left"
    monkeypatch.setenv("COLUMNS", "52")
    clock.now += 1
    line("compiling kernels 4/40, only once, about 20 s left", 0.1)
    assert screen.last() == "compiling kernels 4/40, only once, about 20 s left"
    monkeypatch.setenv("COLUMNS", "20")
    clock.now += 1
    line("loading weights", 0.75)
    assert screen.last() == "loading smal  75%"


def test_a_load_that_compiles_is_not_remembered(model: Path, screen: Screen, clock: Clock) -> None:
    load(model, clock, 2)
    load(model, clock, 60, "compiling kernels 1/40, only once", "loading weights")
    assert begun(model, screen) == "loading small (2.50 MB, 2.0 s last time) ..."


def test_a_changed_file_has_no_last_time(model: Path, screen: Screen, clock: Clock) -> None:
    load(model, clock, 2)
    os.utime(model, (1, 1))
    assert begun(model, screen) == "loading small (2.50 MB) ..."


def test_all_shards_count(tmp_path: Path, screen: Screen, clock: Clock) -> None:
    shards = [tmp_path / f"small-0000{number}-of-00002.gguf" for number in (1, 2)]
    for shard in shards:
        shard.write_bytes(bytes(1_000_000))
    assert begun(shards[0], screen) == "loading small (2.00 MB) ..."


@pytest.mark.parametrize("text", ["", "[]", '{"a": "b"}', '{"a": NaN}', "{" * 9])
def test_damaged_durations_are_ignored(model: Path, screen: Screen, clock: Clock, text: str, tmp_path: Path) -> None:
    (tmp_path / "load-times.json").write_text(text)
    load(model, clock, 2)
    assert begun(model, screen) == "loading small (2.50 MB, 2.0 s last time) ..."


def test_a_limited_number_of_durations_is_stored(
    tmp_path: Path, screen: Screen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_MOST", 3)
    models = [tmp_path / f"{number}.gguf" for number in range(4)]
    for model in models:
        model.write_bytes(b"x")
    for model in (*models[:3], models[0], models[3]):
        load(model, clock, 2)
    assert ["last time" in begun(model, screen) for model in models] == [True, False, True, True]


def test_an_unwritable_cache_does_no_harm(
    model: Path, screen: Screen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(model / "no folder"))
    load(model, clock, 2)
    assert begun(model, screen) == "loading small (2.50 MB) ..."


def test_pipes_and_quiet_runs_get_no_line(
    model: Path, screen: Screen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = Output()
    quiet.quiet = True
    monkeypatch.setattr(loading, "out", quiet)
    load(model, clock, 60, "loading weights")
    assert screen.getvalue() == ""
    monkeypatch.setattr(loading, "out", Output())
    pipe = io.StringIO()
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=screen, stderr=pipe))
    load(model, clock, 9, "loading weights")
    assert pipe.getvalue() == ""
