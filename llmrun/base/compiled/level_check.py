"""A child process that checks whether an instruction-set level works on this processor.

    python -m llmrun.base.compiled.level_check LEVEL

The process exits with 0 if the building blocks of the kernels (kernels/level_probe.py) compute the same bits at this
level as at the portable level. host.py runs the check in a process of its own, because an illegal instruction kills the
process.
"""

from __future__ import annotations

import ctypes
import struct
import sys

from llmrun.base.compiled.kernel import TRIAL
from llmrun.base.compiled.levels import LEVELS, PORTABLE, Level, target_of
from llmrun.base.compiled.library import BASE
from llmrun.base.compiled.loading import load_for

_LINE = 64  # bytes
_RESULTS = 11  # lines


def results(level: Level) -> bytes:
    """Run the building blocks at a level, and return their results."""
    kernel = load_for(target_of(level), [TRIAL], shipped=BASE if level is PORTABLE else "")[TRIAL]
    given, found = ctypes.create_string_buffer(inputs()), ctypes.create_string_buffer(_RESULTS * _LINE)
    kernel(ctypes.addressof(given), ctypes.addressof(found))
    return found.raw


def inputs() -> bytes:
    """Return four lines of 64 bytes: bytes below 16, arbitrary bytes, float16 values, and floats from -16 to -1."""
    any_bytes = [(number * 193 + 71) % 256 for number in range(_LINE)]
    halves = [(number - 7.5) * 2.0 ** (number % 7 - 3) for number in range(16)]
    floats = [-1 - number * 0.937 for number in range(16)]
    return b"".join(
        [
            bytes(byte >> 4 for byte in reversed(any_bytes)),
            bytes(any_bytes),
            struct.pack("<16e32x", *halves),
            struct.pack("<16f", *floats),
        ]
    )


def main(level_name: str) -> int:
    level = next(level for level in LEVELS if level.name == level_name)
    return 0 if results(level) == results(PORTABLE) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
