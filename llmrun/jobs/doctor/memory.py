"""The doctor's checks of memory size, memory bandwidth and the processor's int8 throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from llmrun.base.amounts import counted, format_bandwidth, format_bytes, format_number
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.kernel_warnings import kernel_warnings_told
from llmrun.jobs.doctor.findings import NOTE, OK, PROBLEM, Finding, advice_of
from llmrun.jobs.doctor.machine import Machine

SECTION = "Memory"
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
        yield Finding(SECTION, "memory", NOTE, "the system does not report the amount of memory", facts=facts)
        return
    words = f"{format_bytes(free)} of {format_bytes(total)} free"
    if system.get("memory_type") and system.get("memory_mts"):
        words += f", {system['memory_modules']}× {system['memory_type']}-{system['memory_mts']}"
    little = free < min(_LITTLE, total // 8)
    advice = "Close other programs or use a smaller model, because swapping is slow." if little else ""
    yield Finding(SECTION, "memory", NOTE if little else OK, words, advice, facts=facts)


def measure_speed(machine: Machine) -> Iterator[Finding]:
    """Measure memory bandwidth and int8 throughput. This takes half a second, mostly to fill the buffer.

    The fastest run counts, because other processes can only slow a run down.
    """
    threads, free = machine.system["threads"], machine.system["memory_free"]
    n_bytes = _GIB if free is None else min(_GIB, free // 4)
    if n_bytes < _LEAST_READ:
        yield Finding(SECTION, "speed", NOTE, "not measured: too little memory is free", facts=_speeds(threads))
        return
    from llmrun.backends.cpu.speeds import limits

    trouble: list[str] = []
    try:
        with kernel_warnings_told(trouble.append):
            measured = limits.MachineLimits(threads, n_bytes)
    except UsageError:
        words = "not measured: no valid instruction level is selected"
        yield Finding(SECTION, "speed", NOTE, words, facts=_speeds(threads))
        return
    except LlmrunError as error:
        words = f"a kernel could not be compiled: {error}"
        yield Finding(SECTION, "speed", PROBLEM, words, advice_of(error), facts=_speeds(threads))
        return
    read, multiply = _best(measured.read_bandwidth), _best(measured.multiply_rate)
    words = f"{format_bandwidth(read)} read bandwidth; {format_number(multiply / 1e9)} billion int8 products per second"
    words += f" ({counted(threads, 'thread')})"
    yield Finding(SECTION, "speed", OK, words, facts=_speeds(threads, read, multiply))


def _best(measure: Callable[[], float]) -> float:
    """Return the best of up to three measurements. No new measurement starts after half a second."""
    started, seen = time.monotonic(), [measure()]
    while len(seen) < _TIMES and time.monotonic() - started < _MOST_SECONDS:
        seen.append(measure())
    return max(seen)


def _speeds(threads: int, read: float | None = None, multiply: float | None = None) -> dict[str, float | None]:
    return {"threads": threads, "read_bytes_per_second": read, "int8_products_per_second": multiply}
