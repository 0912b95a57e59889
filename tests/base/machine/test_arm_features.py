"""Tests of the features of Arm processors, on simulated systems."""

from __future__ import annotations

import ctypes
import sys
from unittest import mock

import pytest

from llmrun.base.machine import processor

features = processor.arm_features.__wrapped__

# The words AT_HWCAP (16) and AT_HWCAP2 (26) of Linux for each processor, as QEMU reports them.
CORTEX_A72, CORTEX_A76, MAX = {16: 0x8FB, 26: 0}, {16: 0x119FFB, 26: 0}, {16: 0xECFFFFFB, 26: 0x7F877FFF}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (CORTEX_A72, {"neon": True, "dotprod": False, "i8mm": False}),
        (CORTEX_A76, {"neon": True, "dotprod": True, "i8mm": False}),
        (MAX, {"neon": True, "dotprod": True, "i8mm": True}),
        ({16: 0, 26: 0}, {"neon": False, "dotprod": False, "i8mm": False}),
    ],
)
def test_linux_reports_features_in_two_words(
    monkeypatch: pytest.MonkeyPatch, words: dict[int, int], expected: dict[str, bool]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    library = mock.Mock(getauxval=mock.Mock(side_effect=words.__getitem__))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert features() == expected


def test_a_mac_is_asked_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Apple processor has no matrix products, and macOS 11 has no key for dot products."""
    monkeypatch.setattr(sys, "platform", "darwin")
    m1 = {"hw.optional.neon": "1", "hw.optional.arm.FEAT_DotProd": "1", "hw.optional.arm.FEAT_I8MM": "0"}
    monkeypatch.setattr(processor, "sysctl", m1.get)
    assert features() == {"neon": True, "dotprod": True, "i8mm": False}
    monkeypatch.setattr(processor, "sysctl", {"hw.optional.neon": "1"}.get)
    assert features() == {"neon": True, "dotprod": False, "i8mm": False}


def test_windows_reports_dot_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE."""
    monkeypatch.setattr(sys, "platform", "win32")
    windll = mock.Mock()
    monkeypatch.setattr(ctypes, "windll", windll, raising=False)
    for present in (1, 0):
        windll.kernel32.IsProcessorFeaturePresent = {43: present}.get
        assert features() == {"neon": True, "dotprod": bool(present), "i8mm": False}


def test_other_systems_report_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    assert features() == {}
