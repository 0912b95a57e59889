"""The doctor's checks of the processor and of the instruction-set level that kernels use."""

from __future__ import annotations

import os
from collections.abc import Iterator

from llmrun.base.amounts import counted
from llmrun.base.errors import UsageError
from llmrun.base.kernel_warnings import kernel_warnings_told
from llmrun.base.machine.shell import unset
from llmrun.jobs.doctor.findings import NOTE, OK, PROBLEM, Finding
from llmrun.jobs.doctor.machine import Machine

SECTION = "Processor"
_LEVELS = {
    "avx512vnni": "AVX-512 with VNNI",
    "avxvnni": "AVX2 with VNNI",
    "avx2": "AVX2",
    "neoni8mm": "NEON with int8 matrix products",
    "neondot": "NEON with dot products",
    "portable": "portable instructions (slowest)",
}


def look_at_processor(machine: Machine) -> Iterator[Finding]:
    system = machine.system
    names = ("cpu", "cpu_architecture", "cores_physical", "cores_logical", "cpu_quota", "threads", "machine", "virtual")
    facts = {name: system.get(name) for name in (*names, "container")}
    cores = system.get("cores_physical") or system.get("cores_logical") or 1
    words = f"{system['cpu']}: {counted(cores, 'core')}, {counted(system['threads'], 'thread')} used"
    if system.get("cpu_quota"):
        words += f", limited to {system['cpu_quota']:g} CPUs by this container"
    yield Finding(SECTION, "cpu", OK, words, facts=facts)


def look_at_prefetching(machine: Machine) -> Iterator[Finding]:
    """Report how the kernels prefetch weights. During the first answers, llmrun measures which way is fastest."""
    from llmrun.backends.cpu import prefetching

    threads = machine.system["threads"]
    try:
        words, way = prefetching.way_in_words(threads), prefetching.chosen_way(threads)
    except UsageError:
        return  # LLMRUN_CPU_LEVEL is invalid; look_at_level reports that
    facts = {"way": way, "relative_times": prefetching.stored_times(threads), "threads": threads}
    yield Finding(SECTION, "prefetching", OK, words, facts=facts)


def look_at_level(machine: Machine) -> Iterator[Finding]:
    """Check the instruction-set level in use. llmrun tests each level before using it, and warns if a test fails."""
    del machine
    from llmrun.base.compiled.levels import PORTABLE, host_levels, host_target

    named = [one.name for one in host_levels()]
    forced = os.environ.get("LLMRUN_CPU_LEVEL", "")
    refused: list[str] = []
    try:
        with kernel_warnings_told(refused.append):
            level = host_target().level.name
    except UsageError as error:
        advice = "Let llmrun choose the instructions:"
        yield Finding(SECTION, "kernels_level", PROBLEM, str(error), advice, unset("LLMRUN_CPU_LEVEL"))
        return
    tried = level != PORTABLE.name
    facts = {"level": level, "forced": bool(forced), "tried": tried, "named_by_processor": named, "refused": refused}
    words = f"kernels use {_LEVELS.get(level, level)}"
    if forced:
        words += ", as set by LLMRUN_CPU_LEVEL"
        advice = "This processor supports faster instructions. To use them:" if level != named[0] else ""
        command = unset("LLMRUN_CPU_LEVEL") if advice else ""
        yield Finding(SECTION, "kernels_level", NOTE if advice else OK, words, advice, command, facts)
    elif refused:
        yield Finding(SECTION, "kernels_level", NOTE, f"{words}: {refused[0]}", facts=facts)
    elif not tried:
        yield Finding(SECTION, "kernels_level", NOTE, words, facts=facts)
    else:
        yield Finding(SECTION, "kernels_level", OK, f"{words}; tested on this machine", facts=facts)
