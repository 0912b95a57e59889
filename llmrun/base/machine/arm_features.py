"""Detects the optional instructions of an Arm processor, by LLVM's names.

On Linux and macOS, LLVM 22 never reports dot products or matrix products.
"""

from __future__ import annotations

import ctypes
import functools
import sys

from llmrun.base.machine.processor import sysctl

# The entry of Linux's auxiliary vector (AT_HWCAP or AT_HWCAP2) and the number of the bit in it.
_LINUX = {"neon": (16, 1), "dotprod": (16, 20), "i8mm": (26, 13)}
_MACOS = {"neon": "hw.optional.neon", "dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}


@functools.cache  # on macOS, this starts child processes
def arm_features() -> dict[str, bool]:
    """Return whether the processor has each feature, or {} on systems where LLVM detects them, such as Windows.

    If a processor has several kinds of cores, Linux reports only the features that all of them have.
    """
    if sys.platform == "darwin":
        return {name: sysctl(key) == "1" for name, key in _MACOS.items()}
    if sys.platform != "linux":
        return {}
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name: bool(read(entry) >> bit & 1) for name, (entry, bit) in _LINUX.items()}
