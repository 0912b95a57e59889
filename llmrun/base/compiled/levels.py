"""Instruction levels: the sets of instructions that kernels may use, and the processor that LLVM targets for each set.

All machines of a level run the same machine code, whether it comes from a wheel or was compiled on the machine. Kernels
that LLVM tunes for the machine's own processor were not faster: with six weight types on a Zen 4 (AVX-512 VNNI, two
threads), the kernels of a wheel reached 1.02 times their speed in decode (0.96 to 1.12) and in prefill (0.92 to 1.13).
"""

from __future__ import annotations

import platform
import sys

from msgspec import Struct


class Level(Struct, frozen=True):
    """One instruction level.

    machines      values of platform.machine(); empty for any machine
    features      the features that the processor must have, by their names in LLVM
    cpu           LLVM's name of the processor to compile for; "" for the oldest processor of the architecture
    cpu_features  features in addition to those of `cpu`
    """

    name: str
    machines: tuple[str, ...]
    features: tuple[str, ...]
    cpu: str
    cpu_features: str = ""


X86 = ("x86_64", "AMD64")
ARM = ("aarch64", "arm64", "ARM64")

_HASWELL = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512vnni")

# Cascade Lake was the first processor with AVX-512 VNNI. Later processors add instructions that kernels do not need.
AVX512_VNNI = Level("avx512vnni", X86, (*_HASWELL, *_AVX512), "cascadelake")
# Alder Lake was the first processor with AVX-VNNI, but it is not the target because it also supports GFNI, which this
# level does not require.
AVX_VNNI = Level("avxvnni", X86, (*_HASWELL, "avxvnni"), "haswell", "+avxvnni")
AVX2 = Level("avx2", X86, _HASWELL, "haswell")
# The target is not a core with matrix products, because such Arm cores also support SVE, which is not required here.
NEON_I8MM = Level("neoni8mm", ARM, ("neon", "dotprod", "i8mm"), "cortex-a76", "+i8mm")
NEON_DOT = Level("neondot", ARM, ("neon", "dotprod"), "cortex-a76")
PORTABLE = Level("portable", (), (), "")

LEVELS = (AVX512_VNNI, AVX_VNNI, AVX2, NEON_I8MM, NEON_DOT, PORTABLE)  # from best to worst


class Target(Struct, frozen=True):
    """The machine that LLVM compiles for."""

    level: Level
    triple: str
    cpu: str
    features: str


def target_of(level: Level, triple: str = "") -> Target:
    """Return the target of a level, for this system unless another LLVM triple is given."""
    triple = triple or elf_triple()
    cpu = level.cpu or ("x86-64" if triple.startswith("x86_64") else "generic")
    return Target(level, triple, cpu, level.cpu_features)


def elf_triple() -> str:
    """Return this system's LLVM triple with ELF as the object format, because only ELF symbols can be checked."""
    found = machine()
    found = "x86_64" if found in X86 else "aarch64" if found in ARM else found
    if sys.platform == "win32":
        return f"{found}-pc-windows-msvc-elf"
    return f"{found}-apple-macosx-elf" if sys.platform == "darwin" else f"{found}-unknown-linux-gnu"


def machine() -> str:
    """Return the architecture that this interpreter was built for, as platform.machine() names it.

    Windows on Arm also runs interpreters for x86-64, to which it may report the machine's own architecture.
    """
    if sys.platform == "win32":
        import sysconfig

        return {"win-amd64": "AMD64", "win-arm64": "ARM64"}.get(sysconfig.get_platform(), "")
    return platform.machine()
