"""Tests of how software drivers are told from GPUs by the names that Vulkan reports."""

from __future__ import annotations

import pytest

from llmrun.backends.registry import is_software_device


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llvmpipe (LLVM 15.0.6, 256 bits)", True),
        ("SwiftShader Device (LLVM 10.0.0)", True),
        ("Microsoft Direct3D12 (Microsoft Basic Render Driver)", True),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", False),
        ("Intel(R) Arc(tm) A770 Graphics (DG2)", False),
        ("NVIDIA H200", False),
        ("", False),
    ],
)
def test_software_drivers_are_known_by_name(name: str, expected: bool) -> None:
    assert is_software_device(name) is expected
