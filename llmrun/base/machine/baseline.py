"""Checks that the processor has the instructions that NumPy's packages require (x86-64-v2).

Every command runs this first, so it must not import anything slow.
"""

from __future__ import annotations

import re
from pathlib import Path

_NEEDED = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")  # Linux's names
_FIRST_PROCESSOR = 4096  # bytes that contain its description; reading all would take long on large machines


def missing_instructions(root: Path = Path("/")) -> list[str]:
    """Return the names of the missing instructions. The list is empty if unknown, and on other architectures.

    root  the directory that contains Linux's system files
    """
    try:
        with (root / "proc/cpuinfo").open("rb") as file:
            described = re.search(rb"^flags\s*:(.*)\n", file.read(_FIRST_PROCESSOR), re.MULTILINE)
    except OSError:
        return []
    if described is None:
        return []
    present = described[1].decode("ascii", "replace").split()
    return [name for name in _NEEDED if name not in present]
