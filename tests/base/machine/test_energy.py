"""Tests that joules are counted across a counter's overflow, and never guessed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmrun.base.machine import energy
from llmrun.base.machine.energy import (
    EnergyMeter,
    NvidiaCard,
    NvmlPower,
    RaplPackage,
    gpu_names,
    nvidia_cards,
    rapl_sources,
)

RANGE = 262_143_328_850


def available(root: Path) -> list[energy.EnergySource]:
    return [*rapl_sources(root), *energy.nvml_sources()]


def zone(root: Path, folder: str, name: str, counter: int) -> Path:
    path = root / "sys/class/powercap" / folder
    path.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", counter), ("max_energy_range_uj", RANGE)):
        (path / file).write_text(f"{text}\n")
    return path


class FakeNvml(ModuleType):
    """A driver with one GPU per entry of `energies`: millijoules, or None if the GPU has no counter."""

    class NVMLError(Exception):
        pass

    def __init__(self, energies: list[int | None], *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.energies, self.driver, self.milliwatts = energies, driver, 50_000

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.energies)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, device: int) -> str:  # noqa: N802
        return f"GPU {device}"

    def nvmlDeviceGetUUID(self, device: int) -> str:  # noqa: N802
        return f"GPU-{'ab'[device]}1c5"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        if device:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=1000, free=900)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:  # noqa: N802
        counted = self.energies[device]
        if counted is None:
            raise self.NVMLError("Not Supported")
        return counted

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:  # noqa: N802
        if self.milliwatts < 0:
            raise self.NVMLError("Not Supported")
        return self.milliwatts


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, FakeNvml([], driver=False))
    yield
    energy._nvml.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    energy._nvml.cache_clear()
    return nvml


def test_a_machine_that_counts_nothing_measures_nothing(tmp_path: Path) -> None:
    assert available(tmp_path) == []
    with EnergyMeter([]).measure() as reading:
        time.sleep(0.01)
    assert reading.joules is None
    assert reading.seconds >= 0.01
    assert gpu_names() == []


def test_packages_are_counted_and_not_the_zones_inside_them(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 1_000_000)
    for folder, name in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")):
        zone(tmp_path, folder, name, 0)
    sources = available(tmp_path)
    assert [source.name for source in sources] == ["RAPL package"] * 2
    (first / "energy_uj").write_text("6000000")  # before the measurement
    with EnergyMeter(sources).measure() as reading:
        assert reading.joules is None
        (first / "energy_uj").write_text("9000000")
        (second / "energy_uj").write_text("1500000")
    assert reading.joules == pytest.approx(3.5)
    assert reading.source == "RAPL package"


def test_a_counter_that_starts_again_at_zero_loses_nothing(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 2_000_000)
    with EnergyMeter(rapl_sources(tmp_path)).measure() as reading:
        (path / "energy_uj").write_text("1000000")
    assert reading.joules == pytest.approx(3.0)


def test_a_counter_is_read_often_enough_to_come_round_many_times(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    source = RaplPackage(path)
    assert 30 < source.interval < RANGE / 1e6 / 1000  # at least twice before 1 kW would overflow the counter
    reads = threading.Semaphore(0)
    plain, source.interval = source.joules, 0.001

    def joules() -> float:
        counted = plain()
        reads.release()
        return counted

    source.joules = joules  # type: ignore[method-assign]
    with EnergyMeter([source]).measure() as reading:
        for turn in range(1, 7):  # in thirds of the range, overflowing twice
            (path / "next").write_text(str(RANGE // 3 * turn % RANGE))
            (path / "next").replace(path / "energy_uj")  # atomic, so that it is never read empty
            for _ in range(2):  # the second read began after the change
                assert reads.acquire(timeout=60)
            while reads.acquire(blocking=False):
                pass
    assert reading.joules == pytest.approx(2 * RANGE / 1e6)


def test_a_counter_that_cannot_be_read_is_no_source(tmp_path: Path) -> None:
    (zone(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj").unlink()
    (zone(tmp_path, "intel-rapl:1", "package-1", 0) / "max_energy_range_uj").write_text("")
    assert rapl_sources(tmp_path) == []


def test_a_counter_that_fails_on_the_way_gives_no_sum(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    zone(tmp_path, "intel-rapl:1", "package-1", 0)
    with EnergyMeter(rapl_sources(tmp_path)).measure() as reading:
        (path / "energy_uj").unlink()
    assert reading.joules is None


def test_gpus_that_count_energy_are_read_at_the_ends_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = install(monkeypatch, FakeNvml([7_000, 100_000]))
    sources = available(tmp_path)
    threads = threading.active_count()
    with EnergyMeter(sources).measure() as reading:
        assert threading.active_count() == threads
        nvml.energies = [9_500, 101_000]
    assert reading.joules == pytest.approx(3.5)
    assert reading.source == "NVML"
    assert gpu_names() == ["GPU 0", "GPU 1"]


@pytest.mark.parametrize(
    ("listed", "order", "joules"),
    [
        ("1", "PCI_BUS_ID", 1.0),
        ("1,0", "PCI_BUS_ID", 3.5),
        ("0", "FASTEST_FIRST", None),  # either GPU may have this number
        ("GPU-a1", "FASTEST_FIRST", 2.5),
        ("GPU-b1c5, GPU-a1c5", "FASTEST_FIRST", 3.5),
        ("GPU-", "FASTEST_FIRST", None),  # not unique
        ("0,7,1", "PCI_BUS_ID", 2.5),  # CUDA ignores what follows an error
        ("-1", "PCI_BUS_ID", None),
        ("", "PCI_BUS_ID", None),
        ("MIG-0b2f", "PCI_BUS_ID", None),
    ],
)
def test_hidden_gpus_are_not_counted(
    listed: str, order: str, joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = install(monkeypatch, FakeNvml([0, 0]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    with EnergyMeter(energy.nvml_sources()).measure() as reading:
        nvml.energies = [2_500, 1_000]
    assert reading.joules == joules
    assert len(nvidia_cards()) == 2


def test_numbers_of_equal_gpus_are_unambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml([0, 0]))
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda device: "NVIDIA H100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with EnergyMeter(energy.nvml_sources()).measure() as reading:
        nvml.energies = [2_500, 1_000]
    assert reading.joules == 1.0


def test_the_only_gpu_can_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([0]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert energy.nvml_sources() == []


def test_cards_are_told_with_their_driver_and_their_memory_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvidia_cards() == []
    install(monkeypatch, FakeNvml([0, None]))
    assert nvidia_cards() == [NvidiaCard("GPU 0", "570.1", 1000, 900), NvidiaCard("GPU 1", "570.1", 0, 0)]


def test_processor_and_gpu_are_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = install(monkeypatch, FakeNvml([0]))
    path = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    with EnergyMeter(available(tmp_path)).measure() as reading:
        nvml.energies = [2_000]
        (path / "energy_uj").write_text("1000000")
    assert reading.joules == pytest.approx(3.0)
    assert reading.source == "RAPL package + NVML"


def test_the_power_of_a_gpu_that_counts_no_energy_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = install(monkeypatch, FakeNvml([None]))
    now = [0.0]
    source = NvmlPower(nvml, 0, clock=lambda: now[0])
    now[0], nvml.milliwatts = 2.0, 150_000
    assert source.joules() == pytest.approx(2.0 * 100)  # 50 W, rising to 150 W
    now[0] = 3.0
    assert source.joules() == pytest.approx(150)


def test_a_gpu_that_counts_no_energy_is_sampled_while_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, FakeNvml([None]))
    monkeypatch.setattr(NvmlPower, "interval", 0.01)
    started = time.monotonic()
    with EnergyMeter(available(tmp_path)).measure() as reading:
        time.sleep(0.05)
    assert reading.joules is not None
    assert 50 * 0.05 <= reading.joules <= 50 * (time.monotonic() - started)


def test_a_gpu_that_tells_neither_is_no_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, FakeNvml([None])).milliwatts = -1
    assert available(tmp_path) == []


def test_the_sampling_ends_with_an_error_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, FakeNvml([None]))
    with pytest.raises(RuntimeError), EnergyMeter(available(tmp_path)).measure():
        raise RuntimeError
    assert "llmrun-energy" not in [thread.name for thread in threading.enumerate()]


def test_the_real_library_answers_or_says_that_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    energy._nvml.cache_clear()
    assert len(gpu_names()) >= len(energy.nvml_sources())
    assert hasattr(sys.modules["pynvml"], "nvmlDeviceGetTotalEnergyConsumption")
