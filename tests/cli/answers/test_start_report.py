"""Tests of the lines with which --verbose explains a cold start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from llmrun.base.types import LoadTimes, ModelInfo, Timings
from llmrun.cli.answers import start_report
from llmrun.cli.answers.start_report import start_lines, tell_of_first_token, tell_of_start
from llmrun.cli.console import output

TIMES = LoadTimes(
    header_s=0.12,
    kernels_s=0.05,
    tokenizer_s=0.11,
    packing_s=0.5,
    backend_s=0.6,
    packed_bytes=1_130_000_000,
    page_faults=541,
    system_s=0.42,
)
INFO = ModelInfo("m.gguf", "m", "llama", "Q4_0", 1, 2, 3, 4, 5, 6, "cpu", "2 threads", 2, load_times=TIMES)
TIMINGS = Timings(0.9, 1, 0, 3, 0.03, 0.04, 0.2, 0.24)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_report, "huge_and_anonymous_bytes", lambda: (1_110_000_000, 1_200_000_000))
    monkeypatch.setattr(start_report, "seconds_since_start", lambda: 1.3)
    monkeypatch.setattr(output.out, "verbose", True)


def test_every_phase_of_the_start_is_shown() -> None:
    assert start_lines(TIMES, 1.1, 0.9) == [
        "start      file found after 200 ms, header 120 ms, imports and the rest 180 ms",
        "kernels    50.0 ms",
        "packing    1.13 GB in 500 ms, 2.26 GB/s, system time 420 ms; meanwhile, tokenizer 110 ms",
        "memory     479 page faults per GB of weights; 1.11 GB of 1.20 GB in huge pages",
    ]


def test_unknown_facts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_report, "huge_and_anonymous_bytes", lambda: None)
    assert start_lines(structs.replace(TIMES, page_faults=None, system_s=None), None, 0.9) == [
        "start      header 120 ms, imports and the rest 180 ms",
        "kernels    50.0 ms",
        "packing    1.13 GB in 500 ms, 2.26 GB/s; meanwhile, tokenizer 110 ms",
    ]


def test_models_without_weights_are_described_too() -> None:
    lines = start_lines(structs.replace(TIMES, packing_s=0.0, packed_bytes=0), 1.1, 0.9)
    assert lines[2:] == [
        "packing    0 B in 0 s, system time 420 ms; meanwhile, tokenizer 110 ms",
        "memory     1.11 GB of 1.20 GB in huge pages",
    ]


def test_first_token_counts_from_the_start_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer takes 0.24 s and is complete at 1.3 s. Its first token came after 0.04 s."""
    tell_of_first_token(INFO, TIMINGS)
    assert capsys.readouterr().err == "TTFT       1.10 s from the start, 40.0 ms from the request\n"


@pytest.mark.parametrize("info", [INFO, replace(INFO, load_times=None)], ids=["no token", "other backend"])
def test_no_line_without_a_measured_first_token(info: ModelInfo, capsys: pytest.CaptureFixture[str]) -> None:
    tell_of_first_token(info, replace(TIMINGS, generated_tokens=0) if info.load_times else TIMINGS)
    assert capsys.readouterr().err == ""


def test_other_backends_print_no_start(capsys: pytest.CaptureFixture[str]) -> None:
    tell_of_start(replace(INFO, load_times=None), 0.0)
    assert capsys.readouterr().err == ""
    tell_of_start(INFO, 0.0)
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_equal_models_may_have_loaded_at_different_speeds() -> None:
    assert replace(INFO, load_times=None) == INFO
