"""The doctor's checks of the processor, the instruction-set level of the kernels, and the size and speed of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from llmrun.base.amounts import counted, format_bandwidth, format_bytes, format_number
from llmrun.base.compiled.kernel import KernelCompileError
from llmrun.base.errors import LlmrunError, UsageError, kernel_warnings_told
from llmrun.base.machine.shell import unset
from llmrun.base.machine.system import installed_version
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Finding, Machine, advice_of

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


def look_at_libraries(machine: Machine) -> Iterator[Finding]:
    """Hash all libraries, and report whether kernels come with llmrun or are compiled on this machine."""
    del machine
    from llmrun.base.compiled import library, sources
    from llmrun.base.compiled.loading import JIT, REINSTALL

    trouble, found = "", None
    try:
        found = library.survey()
    except library.BadLibrary as error:
        trouble = str(error)
    compiler = installed_version("numba") if installed_version("llvmlite") else None
    facts = {"shipped": found is not None, "numba": compiler, "sizes": {} if found is None else found.sizes}
    if found is not None:
        size = format_bytes(sum(found.sizes.values()))
        words = f"kernels come with llmrun: {counted(len(found.sizes), 'file')}, {size}"
        changed = sources.digest_of_all() != found.sources
        words += ", but their source files have changed since" if changed else ""
        advice = "Changes to kernels have no effect in an installed wheel. Use a source checkout." if changed else ""
        yield Finding(SECTION, "kernels_origin", NOTE if changed else OK, words, advice, facts=facts)
    elif compiler:
        words = f"kernels are compiled on this machine, by Numba {compiler}"
        words += f": {trouble}" if trouble else ""
        advice, command = ("To use the wheel's kernels again, reinstall llmrun:", REINSTALL) if trouble else ("", "")
        yield Finding(SECTION, "kernels_origin", NOTE if trouble else OK, words, advice, command, facts)
    elif trouble:
        yield Finding(SECTION, "kernels_origin", PROBLEM, trouble, "Reinstall llmrun:", REINSTALL, facts)
    else:
        words = "this installation has neither kernels nor a compiler for them"
        yield Finding(SECTION, "kernels_origin", PROBLEM, words, "Install Numba, which compiles kernels:", JIT, facts)


def look_at_prefetching(machine: Machine) -> Iterator[Finding]:
    """Report how the kernels prefetch weights. During the first answers, llmrun measures which method is fastest."""
    from llmrun.backends.cpu import prefetching

    threads = machine.system["threads"]
    try:
        words, way = prefetching.way_in_words(threads), prefetching.chosen_way(threads)
    except (UsageError, KernelCompileError):
        return  # look_at_level reports an invalid LLMRUN_CPU_LEVEL, and missing kernels
    facts = {"way": way, "relative_times": prefetching.stored_times(threads), "threads": threads}
    yield Finding(SECTION, "prefetching", OK, words, facts=facts)


def look_at_level(machine: Machine) -> Iterator[Finding]:
    """Check the instruction-set level in use. llmrun tests each level before use, and warns if a test fails."""
    from llmrun.base.compiled.host import host_levels, host_target
    from llmrun.base.compiled.levels import PORTABLE

    forced = os.environ.get("LLMRUN_CPU_LEVEL", "")
    refused: list[str] = []
    try:
        with kernel_warnings_told(refused.append):
            named = [one.name for one in host_levels()]
            level = host_target().level.name
    except KernelCompileError:
        if any(finding.status == PROBLEM for finding in look_at_libraries(machine)):
            return  # look_at_libraries has already reported that kernels are missing
        raise
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


MEMORY = "Memory"
_GIB = 1 << 30
_LEAST_READ = 1 << 26  # bytes; a smaller buffer would be read from the processor's cache
_LITTLE = 2 * _GIB
_TIMES = 3
_MOST_SECONDS = 0.5


def look_at_memory(machine: Machine) -> Iterator[Finding]:
    system = machine.system
    names = ("memory_bytes", "memory_free", "memory_modules", "memory_type", "memory_mts")
    facts = {name: system.get(name) for name in names}
    total, free = system.get("memory_bytes"), system.get("memory_free")
    if not total or free is None:
        yield Finding(MEMORY, "memory", NOTE, "the system does not report the amount of memory", facts=facts)
        return
    words = f"{format_bytes(free)} of {format_bytes(total)} free"
    if system.get("memory_type") and system.get("memory_mts"):
        words += f", {system['memory_modules']}× {system['memory_type']}-{system['memory_mts']}"
    little = free < min(_LITTLE, total // 8)
    advice = "Close other programs or use a smaller model, because swapping is slow." if little else ""
    yield Finding(MEMORY, "memory", NOTE if little else OK, words, advice, facts=facts)


def measure_speed(machine: Machine) -> Iterator[Finding]:
    """Measure memory bandwidth and int8 throughput. Measuring takes half a second, mostly to fill the buffer.

    The fastest run counts, because other processes can only slow a run down.
    """
    threads, free = machine.system["threads"], machine.system["memory_free"]
    n_bytes = _GIB if free is None else min(_GIB, free // 4)
    if n_bytes < _LEAST_READ:
        yield Finding(MEMORY, "speed", NOTE, "not measured: too little memory is free", facts=_speeds(threads))
        return
    from llmrun.backends.cpu.speeds import measured as measured_module

    trouble: list[str] = []
    try:
        with kernel_warnings_told(trouble.append):
            measured = measured_module.MachineLimits(threads, n_bytes)
    except UsageError:
        words = "not measured: no valid instruction level is selected"
        yield Finding(MEMORY, "speed", NOTE, words, facts=_speeds(threads))
        return
    except LlmrunError as error:
        words = f"not measured: {error}"
        yield Finding(MEMORY, "speed", PROBLEM, words, advice_of(error), facts=_speeds(threads))
        return
    read, multiply = _best(measured.read_bandwidth), _best(measured.multiply_rate)
    words = f"{format_bandwidth(read)} read bandwidth; {format_number(multiply / 1e9)} billion int8 products per second"
    words += f" ({counted(threads, 'thread')})"
    yield Finding(MEMORY, "speed", OK, words, facts=_speeds(threads, read, multiply))


def _best(measure: Callable[[], float]) -> float:
    """Return the best of up to three measurements. No new measurement starts after half a second."""
    started, seen = time.monotonic(), [measure()]
    while len(seen) < _TIMES and time.monotonic() - started < _MOST_SECONDS:
        seen.append(measure())
    return max(seen)


def _speeds(threads: int, read: float | None = None, multiply: float | None = None) -> dict[str, float | None]:
    return {"threads": threads, "read_bytes_per_second": read, "int8_products_per_second": multiply}
