"""Chooses the instruction level for this processor, and loads kernels of this level.

A process chooses its level once: the best level that the processor reports and that passes a test.
`LLMRUN_CPU_LEVEL` forces a lower level, so that tests and users can run the code for other machines.

The test is necessary because a hypervisor or an emulator may report instructions that it does not execute. Each level
except the portable one is therefore tested once, in a child process that may crash, before it is used. The cache folder
records each success, under a key that covers the level, the machine code of the test and the features that the
processor reports.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import subprocess
import warnings
from collections.abc import Iterable, Sequence

from llmrun import __version__
from llmrun.base.compiled import library
from llmrun.base.compiled.kernel import TRIAL, Kernel, KernelName, Progress
from llmrun.base.compiled.levels import ARM, LEVELS, PORTABLE, X86, Level, Target, machine, target_of
from llmrun.base.compiled.loading import identity_of, load_for
from llmrun.base.errors import KernelWarning, UsageError
from llmrun.base.machine.processor import processor_name
from llmrun.base.processes import commands

IDENTIFY = KernelName.of("processor", "identify")

# The indices of the words that `identify` writes.
_LEAF_1_ECX, _LEAF_7_EBX, _LEAF_7_ECX, _LEAF_7_1_EAX, _EXTENDED_ECX, _XCR0 = range(6)
_AVX, _AVX512 = 0x6, 0xE6  # the bits of XCR0 for the registers that a feature needs
# The word and the bit that report each feature, and the registers that the feature needs. The source is the description
# of the instruction CPUID in Intel's and AMD's manuals.
_FEATURES = {
    "avx2": (_LEAF_7_EBX, 5, _AVX),
    "fma": (_LEAF_1_ECX, 12, _AVX),
    "f16c": (_LEAF_1_ECX, 29, _AVX),
    "movbe": (_LEAF_1_ECX, 22, 0),
    "bmi": (_LEAF_7_EBX, 3, 0),
    "bmi2": (_LEAF_7_EBX, 8, 0),
    "lzcnt": (_EXTENDED_ECX, 5, 0),
    "avxvnni": (_LEAF_7_1_EAX, 4, _AVX),
    "avx512f": (_LEAF_7_EBX, 16, _AVX512),
    "avx512dq": (_LEAF_7_EBX, 17, _AVX512),
    "avx512cd": (_LEAF_7_EBX, 28, _AVX512),
    "avx512bw": (_LEAF_7_EBX, 30, _AVX512),
    "avx512vl": (_LEAF_7_EBX, 31, _AVX512),
    "avx512vnni": (_LEAF_7_ECX, 11, _AVX512),
}
_TIMEOUT_SECONDS = 60.0  # the check usually takes 0.1 s
_FAILS = "this processor reports instructions that do not work"


def load_kernel(module: str, function: str, **parameters: int | str) -> Kernel:
    """Return one kernel for this process's target. If the kernel must be compiled, this takes about a second."""
    name = KernelName.of(module, function, **parameters)
    return load_kernels([name])[name]


def load_kernels(names: Sequence[KernelName], progress: Progress | None = None) -> dict[KernelName, Kernel]:
    """Return a map from names to kernels for this process's target (see `load_for`). Raises KernelCompileError."""
    return load_for(host_target(), names, progress)


def host_features() -> frozenset[str]:
    """Return the features that levels need and that this processor reports, by their names in LLVM.

    A feature counts only if the operating system has also enabled its registers (XCR0).
    """
    if machine() in ARM:
        from llmrun.base.machine.processor import arm_features

        return frozenset(name for name, present in arm_features().items() if present)
    return features_in(_identified()) if machine() in X86 else frozenset()


def _identified() -> Sequence[int]:
    words = (ctypes.c_int64 * 6)()
    kernel = load_for(target_of(PORTABLE), [IDENTIFY], shipped=library.BASE)[IDENTIFY]
    kernel.run(ctypes.addressof(words), 0, 0, 1)
    return list(words)


def features_in(words: Sequence[int]) -> frozenset[str]:
    """Return the features that are reported in the words of the kernel `identify`."""
    return frozenset(
        name
        for name, (word, bit, registers) in _FEATURES.items()
        if words[word] >> bit & 1 and words[_XCR0] & registers == registers
    )


def host_levels() -> list[Level]:
    """Return the levels that this processor claims to support, best first."""
    present, own = host_features(), machine()
    return [
        level
        for level in LEVELS
        if (not level.machines or own in level.machines) and present.issuperset(level.features)
    ]


def level_works(level: Level) -> bool:
    """Return whether level_check.py succeeds for this level.

    Raises OSError if no child process can be started, and TimeoutError if the check is slow, as on a busy machine.
    """
    check = json.dumps([level.name, identity_of(target_of(level), TRIAL), sorted(host_features())])
    if library.seen_before(check):
        return True
    # These kernels are compiled here if necessary. In the child process, compiling would count against the time limit,
    # and errors would be hidden.
    load_for(target_of(level), [TRIAL])
    load_for(target_of(PORTABLE), [TRIAL], shipped=library.BASE)
    try:
        done = subprocess.run(
            commands.command("base.compiled.level_check", level.name),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            # Warnings that end the child process would look like instructions that do not work.
            env={**commands.environment(), "PYTHONWARNINGS": ""},
            **commands.in_own_session(),  # the parent process handles Ctrl-C
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"no result after {_TIMEOUT_SECONDS:g} s") from None
    if done.returncode == 0:
        library.remember(check)
    return done.returncode == 0


@functools.cache
def host_target() -> Target:
    """Return the target of this process, with the best level that works or the level given in LLMRUN_CPU_LEVEL.

    Raises UsageError if the given level does not exist, or does not work on this processor.
    """
    levels = host_levels()
    forced = os.environ.get("LLMRUN_CPU_LEVEL", "")
    if not forced:
        return target_of(_best(levels))
    level = next((level for level in levels if level.name == forced), None)
    if level is None:
        names = ", ".join(level.name for level in levels)
        raise UsageError(
            f"unknown instruction level: LLMRUN_CPU_LEVEL: {forced!r}, this processor supports {names}",
            hint="unset LLMRUN_CPU_LEVEL",
        )
    try:
        trouble = "" if _passes(level) else _FAILS
    except OSError as error:
        trouble = _untested(error)
    if trouble:
        raise UsageError(f"LLMRUN_CPU_LEVEL: {forced!r} cannot be used: {trouble}", hint="unset LLMRUN_CPU_LEVEL")
    return target_of(level)


def machine_key(n_threads: int) -> list[str | int | None]:
    """Return what measured speeds depend on. Speeds with another key are not used."""
    return [processor_name(), host_target().level.name, n_threads, os.cpu_count(), __version__]


def _best(levels: Iterable[Level]) -> Level:
    """Return the best level that works. If no level can be tested, return PORTABLE and issue a warning."""
    for level in levels:
        try:
            if _passes(level):
                return level
        except OSError as error:
            _warn(f"{_untested(error)}: only portable kernels are used")
            break
        _warn(f"{_FAILS}: {level.name} kernels are not used")
    return PORTABLE


def _passes(level: Level) -> bool:
    """Return whether a level passes its test. Raises OSError if the test cannot be run."""
    return level is PORTABLE or level_works(level)


def _untested(error: OSError) -> str:
    return f"this processor's instructions cannot be tested: {error.strerror}"


def _warn(words: str) -> None:
    warnings.warn(words, KernelWarning, stacklevel=4)
