"""The state of the machine during a benchmark, and conditions that distort measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrun.base.amounts import format_bytes
from llmrun.base.machine.system import system_facts

# Drivers with an energy preference (intel_pstate, amd-pstate-epp) report the "powersave" governor even at full speed.
_SLOW_GOVERNORS = ("powersave", "conservative")
_SLOW_PREFERENCES = ("power", "balance_power")
_BUSY = 0.25  # The one-minute load average per core above which measurements are disturbed.
_STOLEN = 0.01  # The share of CPU time at which steal time begins to disturb measurements.
_LEAST_FREE = 0.125  # The share of memory that should be free, capped at 2 GiB.
_GIB = 1 << 30


def system_state(root: Path = Path("/")) -> dict[str, Any]:
    """Return the state of the machine: `system_facts`, and the instruction level and the origin of the kernels.

    The origin is "wheel" or "compiled". Raises UsageError if LLMRUN_CPU_LEVEL names a level that this processor does
    not support.
    """
    from llmrun.base.compiled.host import host_target
    from llmrun.base.compiled.loading import has_library

    target = host_target()
    origin = "wheel" if has_library(target.level.name) else "compiled"
    return {**system_facts(root), "cpu_level": target.level.name, "kernels": origin}


def warnings_about(state: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each condition that would make measurements slower or less stable."""
    found = []
    load, cores = state.get("load_average"), state.get("cores_physical") or 1
    if load and load[0] > _BUSY * cores:
        found.append(
            f"Other programs are running: the load average of the last minute is {load[0]:.2f} on {cores} cores."
        )
    governor, preference = state.get("governor"), state.get("energy_preference")
    if preference in _SLOW_PREFERENCES:
        found.append(f"The CPU is in a power-saving mode: its energy preference is {preference}.")
    elif preference is None and governor in _SLOW_GOVERNORS:
        found.append(f"The CPU is in a power-saving mode: its frequency governor is {governor}.")
    if state.get("on_battery"):
        found.append("The machine is running on battery and may be slower than on mains power.")
    share = _stolen_share(state)
    if state.get("virtual") and share > _STOLEN:
        found.append(
            f"This virtual machine has waited for its CPUs {share:.0%} of the time since it started (steal time)."
        )
    free, total = state.get("memory_free"), state.get("memory_bytes")
    if free and total and free < min(_LEAST_FREE * total, 2 * _GIB):
        found.append(
            f"Little memory is free ({format_bytes(free)} of {format_bytes(total)}): swapping may slow models down."
        )
    return found


def warnings_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each disturbance between two states, recorded before and after measuring."""
    found = []
    if all(state.get("processor_seconds") is not None for state in (before, after)):
        names = ("stolen_seconds", "processor_seconds")
        share = _stolen_share({name: after[name] - before[name] for name in names})
        if share > _STOLEN:
            found.append(f"Other virtual machines took {share:.0%} of the CPU time during the measurement.")
    if after.get("on_battery") and not before.get("on_battery"):
        found.append("The machine was unplugged during the measurement and has run on battery since then.")
    return found


def _stolen_share(state: Mapping[str, Any]) -> float:
    stolen, whole = state.get("stolen_seconds"), state.get("processor_seconds")
    return stolen / whole if stolen and whole and whole > 0 else 0.0
