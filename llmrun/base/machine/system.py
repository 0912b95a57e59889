"""Facts about this machine, its GPUs and its software, as reported by the operating system.

Nothing is run on the GPUs. NVIDIA GPUs are reported by NVIDIA's driver. Other GPUs are found on the PCI bus, where
Linux lists the vendor and driver of each device. Macs with Apple silicon have a built-in GPU. Vulkan lists software
drivers as devices, too, and they are recognized by name.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llmrun import __version__
from llmrun.base.machine.cpu_count import default_threads
from llmrun.base.machine.energy import gpu_names, nvidia_cards
from llmrun.base.machine.memory import free_memory, memory_facts, processor_quota, whole_memory
from llmrun.base.machine.processor import frequency_facts, machine_facts, number_of, processor_name, text_of

_DRIVERS = ("llvmpipe", "SwiftShader", "Microsoft Basic Render Driver")  # those of Mesa, Chromium and Windows


def is_software_device(name: str) -> bool:
    """Return whether a device with this name computes on the processor."""
    return any(driver in name for driver in _DRIVERS)


_DISPLAY_CLASS = "0x03"  # the PCI class of VGA, 3D and display controllers
_ACCELERATOR_CLASS = "0x12"
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_NVIDIA = "NVIDIA"
_RESERVED = "vfio-pci"  # passes the GPU through to a virtual machine


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `driver` is the driver's name and version, or empty if there is no driver.

    Memory sizes are 0 if unknown.
    """

    maker: str  # "NVIDIA", "AMD", "Intel" or "Apple"
    name: str
    driver: str
    memory: int = 0
    memory_free: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether a driver is loaded that can run models. NVIDIA GPUs need NVIDIA's, because nouveau only draws."""
        name = self.driver.removeprefix("driver ")
        if self.maker == _NVIDIA:
            return name[:1].isdecimal() or name == "nvidia"
        return name not in ("", _RESERVED)


def gpus(root: Path = Path("/")) -> list[Gpu]:
    """Return every GPU in the system that could run models."""
    found = [Gpu(_NVIDIA, card.name, f"driver {card.driver}", card.memory, card.memory_free) for card in nvidia_cards()]
    found += [gpu for gpu in _pci_gpus(root) if not (found and gpu.maker == _NVIDIA)]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found.append(Gpu("Apple", processor_name(root), "Metal"))
    return found


def _pci_gpus(root: Path) -> list[Gpu]:
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        maker = _MAKERS.get(text_of(device / "vendor") or "")
        kind = text_of(device / "class") or ""
        if maker is None or not (
            kind.startswith(_DISPLAY_CLASS) or (kind.startswith(_ACCELERATOR_CLASS) and maker == "AMD")
        ):
            continue
        driver, total = device / "driver", number_of(device / "mem_info_vram_total") or 0
        name = text_of(device / "product_name") or f"{maker} GPU {text_of(device / 'device') or ''}".strip()
        found.append(
            Gpu(
                maker,
                name,
                f"driver {driver.resolve().name}" if driver.exists() else "",
                total,
                max(0, total - (number_of(device / "mem_info_vram_used") or 0)),
            )
        )
    return found


_LIBRARIES = ("numba", "llvmlite", "numpy", "llama-cpp-python")


def system_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return facts about the system by name.

    Each is a string, a number, a list of either, or None if unknown. Sizes are in bytes and times in seconds. `root` is
    the directory that contains Linux's system files.
    """
    return {
        "cpu": processor_name(root),
        "cpu_architecture": platform.machine(),
        "cores_physical": _query_or_none(lambda: psutil.cpu_count(logical=False)),
        "cores_logical": _query_or_none(psutil.cpu_count),
        "cpu_quota": processor_quota(root),
        "threads": default_threads(root),
        **frequency_facts(root),
        "load_average": _query_or_none(lambda: [round(load, 2) for load in psutil.getloadavg()]),
        **_stolen_time(),
        "memory_bytes": _or_asked(whole_memory(root), "total"),
        "memory_free": _or_asked(free_memory(root=root), "available"),
        **memory_facts(root),
        **_power(),
        **machine_facts(root),
        "gpus": gpu_names(),
        "os": _operating_system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "llmrun": __version__,
        **{name.replace("-", "_"): _version(name) for name in _LIBRARIES},
    }


def _or_asked(known: int | None, field: str) -> int | None:
    """Return `known`, or what psutil reports if it is None, as on systems other than Linux."""
    return known if known is not None else _query_or_none(lambda: getattr(psutil.virtual_memory(), field))


def _stolen_time() -> dict[str, float | None]:
    """Return the steal time of all logical processors since boot.

    Steal time is the time in which the host ran other virtual machines instead of this one.
    """
    times = _query_or_none(psutil.cpu_times)
    if times is None or not hasattr(times, "steal"):
        return {"stolen_seconds": None, "processor_seconds": None}
    counted = sum(times) - times.guest - times.guest_nice  # user time already includes guest time
    return {"stolen_seconds": times.steal, "processor_seconds": round(counted, 2)}


def _power() -> dict[str, Any]:
    battery = _query_or_none(lambda: psutil.sensors_battery())  # psutil lacks this function on some systems
    if battery is None:
        return {"on_battery": None, "battery_percent": None}
    plugged = battery.power_plugged
    return {"on_battery": None if plugged is None else not plugged, "battery_percent": round(battery.percent)}


def _query_or_none(query: Callable[[], Any]) -> Any:
    """Return the result of a system query, or None if the system cannot answer it."""
    try:
        return query()
    except (OSError, psutil.Error, NotImplementedError, AttributeError, RuntimeError, ValueError):
        return None


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return " ".join(filter(None, (platform.system(), platform.mac_ver()[0] or platform.version())))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
