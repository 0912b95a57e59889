"""Compare two things measured in alternating rounds, so that other load affects both equally."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def compared(label: str, ours: tuple[str, Sequence[float]], theirs: tuple[str, Sequence[float]]) -> str:
    """Return a line with both median speeds in tok/s, and the median, smallest and largest ratio of the rounds."""
    ratios = sorted(a / b for a, b in zip(ours[1], theirs[1], strict=True))
    speeds = "   ".join(f"{name} {statistics.median(speed):8.1f} tok/s" for name, speed in (ours, theirs))
    return f"{label:8}  {speeds}   ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
