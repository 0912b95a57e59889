"""Tests that speeds are measured once and reused, unless they are old, damaged or from another machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.cpu.speeds import machine
from llmrun.backends.cpu.speeds.machine import Speeds
from llmrun.backends.cpu.speeds.measured import AttentionSpeed, LinearSpeed, RowSpeed, keep_speeds, kept_speeds
from llmrun.base.machine.cpu_count import allowed_processors
from llmrun.base.machine.load import Load
from llmrun.model.plan.shapes import ALL as ALL_ROWS
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
        self.load = Load(1)

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
    monkeypatch.setattr(machine, "disturbance", lambda load, threads: "")
    return Counted.measured


@pytest.fixture
def busy(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of what disturbs this machine now. The machine is quiet while the list is empty."""
    words: list[str] = []
    monkeypatch.setattr(machine, "disturbance", lambda load, threads: "".join(words))
    monkeypatch.setattr(machine, "disturbance_now", lambda threads: "".join(words))
    return words


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


# --- on a busy machine ------------------------------------------------------------------------------------------------


def test_speeds_from_a_busy_machine_are_marked(busy: list[str]) -> None:
    busy.append("other programs")
    here = Speeds.of_this_machine(3)
    assert here.disturbance == ""
    here.linear("q8_0")
    assert here.disturbance == "other programs"
    here.keep()
    later = Speeds.of_this_machine(3)
    later.linear("q8_0")
    assert later.disturbance == "other programs"


def test_marked_speeds_are_measured_again_once_it_is_quiet(measured: list[str], busy: list[str]) -> None:
    busy.append("other programs")
    ask()
    ask()
    assert measured == ALL  # measuring again would be no better
    busy.clear()
    ask()
    assert measured == ALL * 2
    here = Speeds.of_this_machine(3)
    here.linear("q8_0")
    here.rows("rmsnorm")
    assert here.disturbance == ""
    ask()
    assert measured == ALL * 2


def test_remeasuring_on_a_busy_machine_says_so(measured: list[str], busy: list[str]) -> None:
    ask()
    busy.append("other programs")
    here = Speeds.of_this_machine(3, afresh=True)
    here.linear("q8_0")
    assert here.disturbance == "other programs"
    assert measured == [*ALL, "q8_0"]


def test_only_the_marked_speeds_are_measured_again(measured: list[str], busy: list[str]) -> None:
    ask()
    busy.append("other programs")
    here = Speeds.of_this_machine(3)
    here.linear("q4_0")
    here.keep()
    busy.clear()
    measured.clear()
    here = Speeds.of_this_machine(3)
    here.linear("q8_0")
    here.linear("q4_0")
    assert measured == ["q4_0"]


def test_the_mark_outlives_other_writers(busy: list[str]) -> None:
    busy.append("other programs")
    ask()
    keep_speeds(3, {**kept_speeds(3), "prefetch": {"none": 1.0}})  # as prefetching.py does
    here = Speeds.of_this_machine(3)
    here.attention(SHAPE, "f16")
    assert here.disturbance == "other programs"


def test_each_speed_has_its_own_age(tmp_path: Path, measured: list[str]) -> None:
    ask()
    body = json.loads(kept(tmp_path).read_text())
    body["speeds"]["taken"]["linear q8_0"]["at"] -= 31 * 24 * 3600
    kept(tmp_path).write_text(json.dumps(body))
    measured.clear()
    ask()
    assert measured == ["q8_0"]


def test_the_bandwidth_alone_is_kept(measured: list[str]) -> None:
    for _ in range(2):
        here = Speeds.of_this_machine(3)
        assert here.weights_read() == 0.9e10
        here.keep()
    assert measured == ["read"] * 3
    ask()
    here.known |= {"linear q4_k": here.known["limits"]}
    assert here.weights_read() == LINEAR.read  # the speed of products is closer to the truth than the bandwidth


def test_unknown_speeds_are_not_measured_if_only_known_ones_are_wanted(measured: list[str]) -> None:
    here = Speeds.of_this_machine(3)
    for unknown in (here.read_bandwidth, lambda: here.linear("q8_0")):
        with pytest.raises(LookupError), here.only_known():
            unknown()
    assert measured == []


@pytest.mark.push
def test_a_real_measurement_beside_busy_programs_is_marked_until_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is really busy at first. Whether it is quiet later depends on other tests, so this is simulated."""
    kernels = Path(os.environ["LLMRUN_CACHE_DIR"]) / "kernels"
    (tmp_path / "kernels").symlink_to(kernels, target_is_directory=True)
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    count = len(allowed_processors())
    spin = "print(flush=True)\nwhile True: pass"
    programs = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        here = Speeds.of_this_machine(count)
        slow = here.read_bandwidth()
        assert here.disturbance.startswith(("other programs used ", "other virtual machines took "))
        here.keep()
        again = Speeds.of_this_machine(count)
        assert again.read_bandwidth() == slow
        assert again.disturbance == here.disturbance
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    monkeypatch.setattr(machine, "disturbance", lambda load, threads: "")
    monkeypatch.setattr(machine, "disturbance_now", lambda threads: "")
    later = Speeds.of_this_machine(count)
    assert later.read_bandwidth() != slow
    assert later.disturbance == ""
    later.keep()
    last = Speeds.of_this_machine(count)
    assert last.read_bandwidth() == later.read_bandwidth()
    assert last.disturbance == ""


@pytest.mark.push
def test_attention_of_encoders_is_measured_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of rows without a mask take less time per product than a few hundred rows with a mask."""
    monkeypatch.setattr(machine, "_SECONDS", 0.0)
    asked: list[tuple[int, int]] = []
    seconds = machine._AttentionTrial.seconds

    def recorded(trial: machine._AttentionTrial, rows: int, start: int) -> tuple[float, float, float]:
        asked.append((rows, start))
        return seconds(trial, rows, start)

    monkeypatch.setattr(machine._AttentionTrial, "seconds", recorded)
    here = Speeds(1)
    masked, unmasked = (here.attention(AttentionShape(2, 2, 16, around=around), "f16") for around in (None, ALL_ROWS))
    assert [start for rows, start in asked if rows > 1] == [machine.ROWS, machine._PATCHES - machine.ROWS]
    assert {name for name in here.known if name.startswith("attention")} == {
        "attention 2 2 16 16 f16",
        "attention 2 2 16 16 f16 unmasked",
    }
    assert min(masked.multiply, unmasked.multiply) > 0
