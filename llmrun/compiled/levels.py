"""Instruction levels: which instructions a kernel may use, and what this processor has.

A process chooses its level once: the best that the processor names and that worked when it was tried
(level_check.py). `LLMRUN_CPU_LEVEL` forces a lower one, so that a test or a doubtful user can run the code of another
machine here.
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
    """One instruction level. `baseline` is the processor LLVM targets when the level is forced below the host's, and
    `baseline_features` what is added to it."""

    name: str
    machines: tuple[str, ...]  # values of platform.machine(); empty: any
    features: tuple[str, ...]  # LLVM feature names that must all be present
    baseline: str  # LLVM processor name
    baseline_features: str = ""


_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")

AVX512_VNNI = Level(
    "avx512vnni",
    _X86,
    ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma", "f16c"),
    "icelake-server",
)
# Not Alder Lake, the first to have it: that has GFNI too, which this level does not ask for.
AVX_VNNI = Level("avxvnni", _X86, ("avx2", "fma", "f16c", "avxvnni"), "haswell", "+avxvnni")
AVX2 = Level("avx2", _X86, ("avx2", "fma", "f16c"), "haswell")
NEON_DOT = Level("neondot", _ARM, ("neon", "dotprod"), "cortex-a76")
PORTABLE = Level("portable", (), (), "")

LEVELS = (AVX512_VNNI, AVX_VNNI, AVX2, NEON_DOT, PORTABLE)  # best first


@dataclass(frozen=True, slots=True)
class Target:
    """What LLVM is told to compile for."""

    level: Level
    triple: str
    cpu: str
    features: str


def host_levels() -> list[Level]:
    """The levels this processor runs, best first. LLVM's probe includes the operating system's consent (XCR0)."""
    present = llvm.get_host_cpu_features()
    machine = platform.machine()
    return [
        level
        for level in LEVELS
        if (not level.machines or machine in level.machines)
        and all(present.get(feature, False) for feature in level.features)
    ]


def target_for(level: Level, best: Level) -> Target:
    """The target that emits `level`; at the best level also the host's tuning and every feature it has."""
    triple = llvm.get_default_triple()
    if "linux" not in triple and not triple.endswith("-elf"):
        triple += "-elf"  # one object format everywhere: the store reads ELF symbol tables only
    if level is best and level is not PORTABLE:
        return Target(level, triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    baseline = level.baseline or {"x86_64": "x86-64", "AMD64": "x86-64"}.get(platform.machine(), "generic")
    return Target(level, triple, baseline, level.baseline_features)


@functools.cache
def host_target() -> Target:
    """The target of this process: the best level that works, or the one LLMRUN_CPU_LEVEL asks for.

    Raises UsageError for a level that does not exist or that this processor cannot run.
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
        f"unknown instruction level: LLMRUN_CPU_LEVEL: {forced!r}, this processor runs {names}",
        hint="unset LLMRUN_CPU_LEVEL",
    )


def _best_that_works(levels: list[Level]) -> Target:
    best = levels[0]
    for level in levels:
        target = target_for(level, best)
        if level is PORTABLE or works(level.name, target.triple, target.cpu, target.features):
            break
        warnings.warn(
            f"instructions that this processor names do not work on it: {level.name}: its kernels are not used",
            KernelWarning,
            stacklevel=2,
        )
    return target
