"""Tests that speeds are measured once and reused, unless they are old, damaged or from another machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.cpu.speeds import machine
from llmrun.backends.cpu.speeds.machine import Speeds
from llmrun.backends.cpu.speeds.measured import AttentionSpeed, LinearSpeed, RowSpeed
from llmrun.model.plan.shapes import AttentionShape

LINEAR = LinearSpeed(1e9, 1e-6, (1.0, 2.0, 3.0))
ROW = RowSpeed((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
ATTENTION = AttentionSpeed(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
SHAPE = AttentionShape(4, 2, 16)


class Counted:
    """A stand-in for OpSpeeds and MachineLimits that counts measurements."""

    measured: list[str]

    def __init__(self, n_threads: int, memory_bytes: int = 0) -> None:
        assert n_threads == 3

    def linear(self, packed: str) -> LinearSpeed:
        self.measured.append(packed)
        return LINEAR

    def rows(self) -> dict[str, RowSpeed]:
        self.measured.append("rows")
        return {"rmsnorm": ROW, "swiglu": ROW, "quantize": ROW}

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        self.measured.append(f"attention {kv_type}")
        return ATTENTION

    def read_bandwidth(self) -> float:
        self.measured.append("read")
        return 1e10


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Counted, "measured", [], raising=False)
    monkeypatch.setattr(machine, "OpSpeeds", Counted)
    monkeypatch.setattr(machine, "MachineLimits", Counted)
    return Counted.measured


def ask(**options: Any) -> None:
    here = Speeds.of_this_machine(3, **options)
    assert here.linear("q8_0") == here.linear("q8_0")
    assert here.linear("q8_0").read == LINEAR.read
    assert list(here.linear("q8_0").multiply) == list(LINEAR.multiply)
    assert here.rows("swiglu").seconds(1, 2048) == 2.0
    assert here.rows("rmsnorm").seconds(2, 2048) == 10.0
    assert here.attention(SHAPE, "f16") == ATTENTION
    assert here.read_bandwidth() == 1e10
    here.keep()


ALL = ["q8_0", "rows", "attention f16", "read", "read", "read"]


def test_a_second_process_measures_nothing(measured: list[str]) -> None:
    ask()
    assert measured == ALL
    ask()
    assert measured == ALL
    ask(afresh=True)
    assert measured == ALL * 2


def test_only_what_is_missing_is_measured(measured: list[str]) -> None:
    ask()
    measured.clear()
    here = Speeds.of_this_machine(3)
    here.linear("q4_0")
    here.attention(SHAPE, "q8_0")
    here.keep()
    assert measured == ["q4_0", "attention q8_0"]
    Speeds.of_this_machine(3).linear("q4_0")
    assert measured == ["q4_0", "attention q8_0"]


def kept(folder: Path) -> Path:
    return folder / "speeds" / "3.json"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("measured", 0),
        ("measured", 1e12),
        ("measured", "now"),
        ("machine", ["another"]),
        ("speeds", [1]),
        ("speeds", 1),
    ],
)
def test_what_is_old_or_of_another_machine_is_measured_again(
    tmp_path: Path, measured: list[str], key: str, value: object
) -> None:
    ask()
    body = json.loads(kept(tmp_path).read_text())
    kept(tmp_path).write_text(json.dumps(body | {key: value}))
    ask()
    assert measured == ALL * 2


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, " " * (2 << 20)])
def test_a_damaged_file_is_measured_again(tmp_path: Path, measured: list[str], text: str) -> None:
    ask()
    kept(tmp_path).write_text(text)
    ask()
    assert measured == ALL * 2


@pytest.mark.parametrize("value", [None, "fast", -1.0, 0.0, float("nan"), float("inf"), True, [1.0]])
def test_a_damaged_speed_is_measured_again(tmp_path: Path, measured: list[str], value: object) -> None:
    ask()
    body = json.loads(kept(tmp_path).read_text())
    body["speeds"]["linear q8_0"]["multiply"] = value
    body["speeds"]["limits"]["read"] = value
    kept(tmp_path).write_text(json.dumps(body))
    measured.clear()
    ask()
    assert sorted(measured) == ["q8_0", "read", "read", "read"]


def test_a_folder_that_cannot_be_written_costs_time_and_no_more(tmp_path: Path, measured: list[str]) -> None:
    (tmp_path / "speeds").write_text("in the way")
    ask()
    ask()
    assert measured == ALL * 2
