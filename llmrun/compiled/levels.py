"""Instruction levels: the sets of instructions that kernels may use, and the levels that this processor supports.

A process chooses its level once. It uses the best level that the processor reports and that passes the probe
(level_check.py). `LLMRUN_CPU_LEVEL` forces a lower level, so that tests and users can run the code for other machines.
"""

from __future__ import annotations

import functools
import os
import platform
import warnings
from dataclasses import dataclass

import llvmlite.binding as llvm

from llmrun.compiled.level_check import works
from llmrun.errors import KernelWarning, UsageError


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction level.

    If a level below the host's best level is forced, LLVM targets the processor `baseline` with `baseline_features`.
    """

    name: str
    machines: tuple[str, ...]  # values of platform.machine(); empty for any machine
    features: tuple[str, ...]  # LLVM feature names that must all be present
    baseline: str  # the name of a processor in LLVM
    baseline_features: str = ""


_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")

AVX512_VNNI = Level(
    "avx512vnni",
    _X86,
    ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma", "f16c"),
    "icelake-server",
)
# Alder Lake was the first processor with AVX-VNNI. It is not the baseline, because it also has GFNI, which this level
# does not require.
AVX_VNNI = Level("avxvnni", _X86, ("avx2", "fma", "f16c", "avxvnni"), "haswell", "+avxvnni")
AVX2 = Level("avx2", _X86, ("avx2", "fma", "f16c"), "haswell")
NEON_DOT = Level("neondot", _ARM, ("neon", "dotprod"), "cortex-a76")
PORTABLE = Level("portable", (), (), "")

LEVELS = (AVX512_VNNI, AVX_VNNI, AVX2, NEON_DOT, PORTABLE)  # from best to worst


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that LLVM compiles for."""

    level: Level
    triple: str
    cpu: str
    features: str


def host_levels() -> list[Level]:
    """Return the levels that this processor claims to support, best first.

    LLVM's detection also checks that the operating system has enabled the registers (XCR0).
    """
    present = llvm.get_host_cpu_features()
    machine = platform.machine()
    return [
        level
        for level in LEVELS
        if (not level.machines or machine in level.machines)
        and all(present.get(feature, False) for feature in level.features)
    ]


def target_for(level: Level, best: Level) -> Target:
    """Return the target for `level`. The best level also uses the host's tuning and all of its features."""
    triple = llvm.get_default_triple()
    if "linux" not in triple and not triple.endswith("-elf"):
        triple += "-elf"  # use one object format everywhere, because the store reads only ELF symbol tables
    if level is best and level is not PORTABLE:
        return Target(level, triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    baseline = level.baseline or {"x86_64": "x86-64", "AMD64": "x86-64"}.get(platform.machine(), "generic")
    return Target(level, triple, baseline, level.baseline_features)


@functools.cache
def host_target() -> Target:
    """Return the target of this process, with the best level that works or the level given in LLMRUN_CPU_LEVEL.

    Raises UsageError if the given level does not exist or this processor does not support it.
    """
    levels = host_levels()
    forced = os.environ.get("LLMRUN_CPU_LEVEL", "")
    if not forced:
        return _best_that_works(levels)
    for level in levels:
        if level.name == forced:
            return target_for(level, levels[0])
    names = ", ".join(level.name for level in levels)
    raise UsageError(
        f"unknown instruction level: LLMRUN_CPU_LEVEL: {forced!r}, this processor supports {names}",
        hint="unset LLMRUN_CPU_LEVEL",
    )


def _best_that_works(levels: list[Level]) -> Target:
    best = levels[0]
    for level in levels:
        target = target_for(level, best)
        if level is PORTABLE or works(level.name, target.triple, target.cpu, target.features):
            break
        warnings.warn(
            f"this processor reports instructions that fail on it: {level.name} kernels are not used",
            KernelWarning,
            stacklevel=2,
        )
    return target
