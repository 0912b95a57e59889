"""Tests of the devices that get layers, and of options that do not match the devices."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.backends.llama.placement import Placement
from llmrun.errors import UsageError

DEVICES = [{"description": name, "free": 1, "total": 2} for name in ("10.0.0.2:50052", "NVIDIA H200", "NVIDIA L4")]
NAMES = "10.0.0.2:50052, NVIDIA H200, NVIDIA L4"


def placement(**options: Any) -> Placement:
    return Placement(512, 1, "f16", None, None, **options)


@pytest.mark.parametrize("options", [{}, {"tensor_split": (3.0, 0.0, 1.0)}, {"split_mode": "row"}])
def test_all_devices_are_used(options: dict[str, Any]) -> None:
    assert placement(**options).used(DEVICES) == DEVICES


@pytest.mark.parametrize("number", [0, 1, 2])
def test_without_a_split_one_device_is_used(number: int) -> None:
    assert placement(split_mode="none", main_gpu=number).used(DEVICES) == [DEVICES[number]]


@pytest.mark.parametrize(
    ("split", "numbers"), [((1.0,), "1 number"), ((1.0, 1.0), "2 numbers"), ((1.0,) * 4, "4 numbers")]
)
def test_a_split_for_other_devices_is_refused(split: tuple[float, ...], numbers: str) -> None:
    with pytest.raises(UsageError) as caught:
        placement(tensor_split=split).used(DEVICES)
    assert str(caught.value) == f"--tensor-split: {numbers} for 3 devices: {NAMES}"


def test_a_main_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        placement(split_mode="none", main_gpu=3).used(DEVICES)
    assert str(caught.value) == (f"--main-gpu: 3 is not one of llama.cpp's devices, which are numbered from 0: {NAMES}")


def test_without_devices_there_is_nothing_to_check() -> None:
    """All layers then run on the CPU, and a note says so."""
    assert placement(tensor_split=(1.0, 1.0)).used([]) == []
    assert placement(split_mode="none", main_gpu=3).used([]) == []
