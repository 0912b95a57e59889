"""Tests of what NVIDIA's driver reports."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from llmrun.base.machine.gpus import NvidiaCard, nvidia_cards


class FakeNvml(ModuleType):
    """A driver with two GPUs, of which only the first tells its memory."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.driver = driver

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, device: int) -> str:  # noqa: N802
        return f"GPU {device}"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        if device:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=1000, free=900)


def test_without_a_driver_there_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    assert nvidia_cards() == []


def test_cards_are_told_with_their_driver_and_their_memory_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert nvidia_cards() == [NvidiaCard("GPU 0", "570.1", 1000, 900), NvidiaCard("GPU 1", "570.1", 0, 0)]


def test_a_failing_card_keeps_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()

    def name(device: int) -> str:
        if device:
            raise nvml.NVMLError("GPU is lost")
        return "GPU 0"

    monkeypatch.setattr(nvml, "nvmlDeviceGetName", name)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [card.name for card in nvidia_cards()] == ["GPU 0"]


def test_the_real_library_answers_or_says_that_there_is_no_driver() -> None:
    assert isinstance(nvidia_cards(), list)
    assert hasattr(sys.modules["pynvml"], "nvmlDeviceGetMemoryInfo")
