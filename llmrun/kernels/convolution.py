"""The gated short convolution of LFM2, over positions kept in the KV cache's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def convolution_reference(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """x float32[rows, 3 * width] (b, c, y), all positions of one sequence; weight float32[width, taps]; returns
    float32[rows, width]."""
    import numpy as np

    b, c, y = np.split(x, 3, axis=1)
    width, taps = weight.shape
    kept = np.concatenate([np.zeros((taps - 1, width), np.float32), b * y])
    total = np.zeros_like(y)
    for tap in range(taps):
        total += kept[tap : tap + len(x)] * weight[:, tap]
    result: NDArray[np.float32] = c * total
    return result
