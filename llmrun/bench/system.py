"""What was true of the machine when it was measured, and what of it spoils a measurement."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from llmrun import __version__
from llmrun.backends.cpu_count import default_threads
from llmrun.backends.free_memory import free_memory
from llmrun.bench.energy import gpu_names
from llmrun.bench.memory_modules import memory_facts
from llmrun.bench.processor import frequency_facts, machine_facts, processor_name, processor_quota

_LIBRARIES = ("numba", "llvmlite", "numpy", "llama-cpp-python")
# Where there is a preference (intel_pstate, amd-pstate-epp), the governor says "powersave" on a fast machine too.
_SLOW_GOVERNORS = ("powersave", "conservative")
_SLOW_PREFERENCES = ("power", "balance_power")
_BUSY = 0.25  # processes that ran or waited in the last minute, for each core: more than that disturbs
_STOLEN = 0.01  # share of the processors' time
_LEAST_FREE = 0.125  # share of the memory, where that is less than 2 GiB
_GIB = 1 << 30


def system_state(root: Path = Path("/")) -> dict[str, Any]:
    """`system_facts`, and the instruction level of the kernels. Raises UsageError for a level (LLMRUN_CPU_LEVEL) that
    this processor does not have."""
    return {**system_facts(root), "cpu_level": _instruction_level()}


def system_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Facts by name: text, numbers, lists of them, or None where the machine does not tell.

    Sizes are bytes, times seconds. `root` is where the files of Linux lie.
    """
    return {
        "cpu": processor_name(root),
        "cpu_architecture": platform.machine(),
        "cores_physical": _told(lambda: psutil.cpu_count(logical=False)),
        "cores_logical": _told(psutil.cpu_count),
        "cpu_quota": processor_quota(root),
        "threads": default_threads(),
        **frequency_facts(root),
        "load_average": _told(lambda: [round(load, 2) for load in psutil.getloadavg()]),
        **_stolen_time(),
        "memory_bytes": _told(lambda: psutil.virtual_memory().total),
        "memory_free": _free_memory(),
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


def warnings_about(state: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing that makes what is about to be measured slower, or less steady, than it need be."""
    found = []
    load, cores = state.get("load_average"), state.get("cores_physical") or 1
    if load and load[0] > _BUSY * cores:
        found.append(f"Other programs are busy: the load was {load[0]:.2f} over the last minute, on {cores} cores.")
    governor, preference = state.get("governor"), state.get("energy_preference")
    if preference in _SLOW_PREFERENCES:
        found.append(f"The processor saves power: its energy preference is {preference}.")
    elif preference is None and governor in _SLOW_GOVERNORS:
        found.append(f"The processor saves power: its frequency governor is {governor}.")
    if state.get("on_battery"):
        found.append("The machine runs on its battery, and may be slower than on mains power.")
    share = _stolen_share(state)
    if state.get("virtual") and share > _STOLEN:
        found.append(
            f"This virtual machine was kept waiting for its processors {share:.0%} of the time since it started."
        )
    free, total = state.get("memory_free"), state.get("memory_bytes")
    if free and total and free < min(_LEAST_FREE * total, 2 * _GIB):
        found.append(
            f"Little memory is free: {free / _GIB:.1f} of {total / _GIB:.1f} GiB; what is swapped out is slow."
        )
    return found


def warnings_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The same for what happened between two states, the measurement between them."""
    found = []
    if all(state.get("processor_seconds") is not None for state in (before, after)):
        names = ("stolen_seconds", "processor_seconds")
        share = _stolen_share({name: after[name] - before[name] for name in names})
        if share > _STOLEN:
            found.append(f"Another virtual machine took {share:.0%} of the processors' time during the measurement.")
    if after.get("on_battery") and not before.get("on_battery"):
        found.append("The machine was unplugged during the measurement, and ran on its battery from then on.")
    return found


def _free_memory() -> int | None:
    free = free_memory()
    if free is None:
        free = _told(lambda: psutil.virtual_memory().available)
    return free


def _stolen_share(state: Mapping[str, Any]) -> float:
    stolen, whole = state.get("stolen_seconds"), state.get("processor_seconds")
    return stolen / whole if stolen and whole and whole > 0 else 0.0


def _stolen_time() -> dict[str, float | None]:
    """Of all logical processors since the machine started. A virtual machine's are sometimes run for another one."""
    times = _told(psutil.cpu_times)
    if times is None or not hasattr(times, "steal"):
        return {"stolen_seconds": None, "processor_seconds": None}
    counted = sum(times) - times.guest - times.guest_nice  # a guest's time is counted as the user's too
    return {"stolen_seconds": times.steal, "processor_seconds": round(counted, 2)}


def _power() -> dict[str, Any]:
    battery = _told(lambda: psutil.sensors_battery())  # not on every system
    if battery is None:
        return {"on_battery": None, "battery_percent": None}
    plugged = battery.power_plugged
    return {"on_battery": None if plugged is None else not plugged, "battery_percent": round(battery.percent)}


def _told(question: Callable[[], Any]) -> Any:
    """The answer, or None where the system has none to give."""
    try:
        return question()
    except (OSError, psutil.Error, NotImplementedError, AttributeError, RuntimeError, ValueError):
        return None


def _instruction_level() -> str:
    from llmrun.kernels.levels import host_target

    return host_target().level.name


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
