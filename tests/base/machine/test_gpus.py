"""Tests that GPUs are found through their drivers and on the bus, each once."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from llmrun.base.machine import gpus
from llmrun.base.machine.gpus import Gpu, NvidiaCard

H200 = NvidiaCard("NVIDIA H200", "570.1", 150_000, 140_000)


@pytest.fixture(autouse=True)
def a_linux_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    drive(monkeypatch)


def drive(monkeypatch: pytest.MonkeyPatch, *cards: NvidiaCard) -> None:
    monkeypatch.setattr(gpus, "nvidia_cards", lambda: list(cards))


def plug(root: Path, slot: str, maker: str, kind: str, driver: str = "", **files: str) -> None:
    device = root / "sys/bus/pci/devices" / slot
    device.mkdir(parents=True)
    for name, text in {"vendor": maker, "class": kind, "device": "0x1234", **files}.items():
        (device / name).write_text(text + "\n")
    if driver:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(root / "drivers" / driver)


def test_a_machine_without_any_has_none(tmp_path: Path) -> None:
    plug(tmp_path, "0", "0x1af4", "0x030000", "virtio-pci")  # a virtual display
    plug(tmp_path, "1", "0x8086", "0x020000", "e1000")  # a network card
    assert gpus.gpus(tmp_path) == []
    assert gpus.gpus(tmp_path / "no system") == []


def test_nvidias_driver_answers_for_its_gpus_which_are_not_taken_from_the_bus_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug(tmp_path, "0", "0x10de", "0x030200", "nvidia")
    plug(tmp_path, "1", "0x8086", "0x030000", "i915")
    drive(monkeypatch, H200)
    assert gpus.gpus(tmp_path) == [
        Gpu("NVIDIA", "NVIDIA H200", "driver 570.1", 150_000, 140_000),
        Gpu("Intel", "Intel GPU 0x1234", "driver i915"),
    ]


def test_a_gpu_that_no_driver_has_taken_is_there_all_the_same(tmp_path: Path) -> None:
    plug(tmp_path, "0", "0x10de", "0x030000")
    assert gpus.gpus(tmp_path) == [Gpu("NVIDIA", "NVIDIA GPU 0x1234", "")]


@pytest.mark.parametrize(
    ("maker", "driver", "usable"),
    [
        ("NVIDIA", "driver 580.1", True),
        ("NVIDIA", "driver nvidia", True),  # loaded, but NVML does not answer
        ("NVIDIA", "driver nouveau", False),
        ("NVIDIA", "driver vfio-pci", False),
        ("NVIDIA", "", False),
        ("AMD", "driver amdgpu", True),
        ("AMD", "driver vfio-pci", False),
        ("Intel", "driver xe", True),
        ("Apple", "Metal", True),
    ],
)
def test_only_drivers_that_run_models_count(maker: str, driver: str, usable: bool) -> None:
    assert Gpu(maker, "GPU", driver).is_usable is usable


def test_amds_driver_tells_its_memory_and_perhaps_its_name(tmp_path: Path) -> None:
    plug(
        tmp_path,
        "0",
        "0x1002",
        "0x038000",
        "amdgpu",
        product_name="Radeon PRO W7900",
        mem_info_vram_total="48000",
        mem_info_vram_used="8000",
    )
    plug(tmp_path, "1", "0x1002", "0x120000", "amdgpu", mem_info_vram_total="what")  # an MI series GPU
    assert gpus.gpus(tmp_path) == [
        Gpu("AMD", "Radeon PRO W7900", "driver amdgpu", 48_000, 40_000),
        Gpu("AMD", "AMD GPU 0x1234", "driver amdgpu"),
    ]


@pytest.mark.parametrize(("machine", "count"), [("arm64", 1), ("x86_64", 0)])
def test_a_mac_with_an_apple_processor_has_its_own(
    machine: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(gpus, "processor_name", lambda root: "Apple M4")
    assert gpus.gpus(tmp_path) == [Gpu("Apple", "Apple M4", "Metal")] * count
