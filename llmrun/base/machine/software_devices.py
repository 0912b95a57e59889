"""Tells software drivers from GPUs. Vulkan lists both as devices."""

from __future__ import annotations

_DRIVERS = ("llvmpipe", "SwiftShader", "Microsoft Basic Render Driver")  # those of Mesa, Chromium and Windows


def is_software_device(name: str) -> bool:
    """Return whether a device with this name computes on the processor."""
    return any(driver in name for driver in _DRIVERS)
