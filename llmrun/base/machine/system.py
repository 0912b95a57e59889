"""Facts about this machine and its software, as reported by the operating system."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import psutil

from llmrun import __version__
from llmrun.base.machine.cpu_count import default_threads
from llmrun.base.machine.gpus import nvidia_cards
from llmrun.base.machine.load import query_or_none, stolen_time
from llmrun.base.machine.memory import free_memory, memory_facts, processor_quota, whole_memory
from llmrun.base.machine.processor import frequency_facts, machine_facts, processor_name

_LIBRARIES = ("numba", "llvmlite", "numpy", "llama-cpp-python")


def system_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return facts about the system by name.

    Each fact is a string, a number, a list of strings or numbers, or None if unknown. Sizes are in bytes and times in
    seconds. `root` is the directory that contains Linux's system files.
    """
    return {
        "cpu": processor_name(root),
        "cpu_architecture": platform.machine(),
        "cores_physical": query_or_none(lambda: psutil.cpu_count(logical=False)),
        "cores_logical": query_or_none(psutil.cpu_count),
        "cpu_quota": processor_quota(root),
        "threads": default_threads(root),
        **frequency_facts(root),
        "load_average": query_or_none(lambda: [round(load, 2) for load in psutil.getloadavg()]),
        **stolen_time(),
        "memory_bytes": _or_asked(whole_memory(root), "total"),
        "memory_free": _or_asked(free_memory(root=root), "available"),
        **memory_facts(root),
        **_power(),
        **machine_facts(root),
        "gpus": [card.name for card in nvidia_cards()],
        "os": _operating_system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "llmrun": __version__,
        **{name.replace("-", "_"): installed_version(name) for name in _LIBRARIES},
    }


def available_memory() -> int | None:
    """Return the free memory in bytes, also on systems other than Linux, or None if unknown."""
    return _or_asked(free_memory(), "available")


def _or_asked(known: int | None, field: str) -> int | None:
    """Return `known`, or psutil's value if `known` is None, as on systems other than Linux."""
    return known if known is not None else query_or_none(lambda: getattr(psutil.virtual_memory(), field))


def _power() -> dict[str, Any]:
    battery = query_or_none(lambda: psutil.sensors_battery())  # psutil lacks this function on some systems
    if battery is None:
        return {"on_battery": None, "battery_percent": None}
    plugged = battery.power_plugged
    return {"on_battery": None if plugged is None else not plugged, "battery_percent": round(battery.percent)}


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return " ".join(filter(None, (platform.system(), platform.mac_ver()[0] or platform.version())))


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, given its name on PyPI, or None if the package is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
