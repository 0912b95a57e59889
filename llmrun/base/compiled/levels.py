"""Instruction levels: the sets of instructions that kernels may use, and the levels that this processor supports.

A process chooses its level once: the best level that the processor reports and that passes a test.
`LLMRUN_CPU_LEVEL` forces a lower level, so that tests and users can run the code for other machines.

The test is necessary because a hypervisor or an emulator may report instructions that it does not execute. Each level
except the portable one is therefore tried once, in a child process that may crash, before it is used. Successes are
recorded in the cache folder, under a key that consists of the processor and the code of the probe.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

from llmrun.base import folders
from llmrun.base.errors import KernelWarning, UsageError
from llmrun.base.processes import commands

# This folder contains the probe's source files, which are part of the cache key.
_KERNELS = Path(__file__).resolve().parents[2] / "kernels"
_TRIED = ("level_probe.py", "code/dots.py", "code/simd.py", "code/unpack.py")
_WORKED = b"worked\n"
_TIMEOUT_SECONDS = 60.0  # the probe usually takes half a second


def level_works(level: str, triple: str, cpu: str, features: str) -> bool:
    """Return whether level_probe.py succeeds for this target.

    Raises OSError if no child process can be started, and TimeoutError if the probe is slow, as on a busy machine.
    """
    sources = [(_KERNELS / name).read_bytes() for name in _TRIED]
    tried = "\0".join([level, triple, cpu, features, version("llvmlite"), version("numba")]).encode()
    path = folders.cache_folder("levels") / hashlib.sha256(b"\0".join([tried, *sources])).hexdigest()
    with contextlib.suppress(OSError):
        if path.read_bytes() == _WORKED:
            return True
    command = commands.command("kernels.level_probe", level, triple, cpu, features)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env=commands.environment(),
            **commands.in_own_session(),  # the parent process handles Ctrl-C
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"no result after {_TIMEOUT_SECONDS:g} s") from None
    if done.returncode == 0:
        _remember(path)
    return done.returncode == 0


def _remember(path: Path) -> None:
    """Record that a probe succeeded. If the record cannot be written, the next run repeats the probe."""
    with contextlib.suppress(OSError):
        folders.write_whole(path, _WORKED)


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
_ARM = ("aarch64", "arm64", "ARM64")

AVX512_VNNI = Level(
    "avx512vnni",
    _X86,
    ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma", "f16c"),
    "icelake-server",
)
# Alder Lake was the first processor with AVX-VNNI, but it is not the baseline because it also supports GFNI, which this
# level does not require.
AVX_VNNI = Level("avxvnni", _X86, ("avx2", "fma", "f16c", "avxvnni"), "haswell", "+avxvnni")
AVX2 = Level("avx2", _X86, ("avx2", "fma", "f16c"), "haswell")
# The baseline is not a core with matrix products, because such Arm cores also support SVE, which is not required here.
NEON_I8MM = Level("neoni8mm", _ARM, ("neon", "dotprod", "i8mm"), "cortex-a76", "+i8mm")
NEON_DOT = Level("neondot", _ARM, ("neon", "dotprod"), "cortex-a76")
PORTABLE = Level("portable", (), (), "")

LEVELS = (AVX512_VNNI, AVX_VNNI, AVX2, NEON_I8MM, NEON_DOT, PORTABLE)  # from best to worst

_FAILS = "this processor reports instructions that do not work"


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
    present, machine = _host_features(), platform.machine()
    return [
        level
        for level in LEVELS
        if (not level.machines or machine in level.machines)
        and all(present.get(feature, False) for feature in level.features)
    ]


def elf_triple() -> str:
    """Return this system's LLVM triple with ELF as the object format, because the store reads only ELF symbols."""
    triple = llvm.get_default_triple()
    return triple if "linux" in triple or triple.endswith("-elf") else f"{triple}-elf"


def _host_features() -> llvm.FeatureMap:
    present = llvm.get_host_cpu_features()
    if platform.machine() in _ARM:
        from llmrun.base.machine.processor import arm_features

        present.update(arm_features())
    return present


def target_for(level: Level, best: Level) -> Target:
    """Return the target for `level`. The best level is also tuned for the host, with all of the host's features."""
    triple = elf_triple()
    if level is best and level is not PORTABLE:
        return Target(level, triple, llvm.get_host_cpu_name(), _host_features().flatten())
    baseline = level.baseline or {"x86_64": "x86-64", "AMD64": "x86-64"}.get(platform.machine(), "generic")
    return Target(level, triple, baseline, level.baseline_features)


@functools.cache
def host_target() -> Target:
    """Return the target of this process, with the best level that works or the level given in LLMRUN_CPU_LEVEL.

    Raises UsageError if the given level does not exist, or does not work on this processor.
    """
    levels = host_levels()
    targets = {level.name: target_for(level, levels[0]) for level in levels}
    forced = os.environ.get("LLMRUN_CPU_LEVEL", "")
    if not forced:
        return _best(targets)
    if forced not in targets:
        raise UsageError(
            f"unknown instruction level: LLMRUN_CPU_LEVEL: {forced!r}, this processor supports {', '.join(targets)}",
            hint="unset LLMRUN_CPU_LEVEL",
        )
    try:
        trouble = "" if _passes(targets[forced]) else _FAILS
    except OSError as error:
        trouble = _untested(error)
    if trouble:
        raise UsageError(f"LLMRUN_CPU_LEVEL: {forced!r} cannot be used: {trouble}", hint="unset LLMRUN_CPU_LEVEL")
    return targets[forced]


def _best(targets: Mapping[str, Target]) -> Target:
    """Return the best target that works. If no level can be tested, return the portable target and issue a warning."""
    for target in targets.values():
        try:
            if _passes(target):
                return target
        except OSError as error:
            _warn(f"{_untested(error)}: only portable kernels are used")
            break
        _warn(f"{_FAILS}: {target.level.name} kernels are not used")
    return targets[PORTABLE.name]


def _passes(target: Target) -> bool:
    """Return whether a level passes its test. Raises OSError if the test cannot be run."""
    return target.level is PORTABLE or level_works(target.level.name, target.triple, target.cpu, target.features)


def _untested(error: OSError) -> str:
    return f"this processor's instructions cannot be tested: {error.strerror}"


def _warn(words: str) -> None:
    warnings.warn(words, KernelWarning, stacklevel=4)
