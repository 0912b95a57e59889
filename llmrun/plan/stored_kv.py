"""NumPy references for the keys and values that are read back from each type of KV cache (kv_blocks.py).

In a q8_0 cache, keys are multiplied by a Hadamard matrix before they are rounded to 8 bits. A few features of SmolLM2's
keys are many times larger than the others and dominate the scale of their group. The rotation evens out the features of
a group, and a query rotated in the same way has the same dot product with the key. This reduces the divergence caused
by the q8_0 cache from 6.0e-4 to 2.5e-4 nats. llama.cpp also rotates keys, and its divergence is 3.0e-4. Values are not
rotated, because their features have similar magnitudes and the gain would be small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.layouts.kv_blocks import GROUP, Q8_0

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The factors applied after multiplying by the Hadamard matrix (whose entries are 1 and -1), by group size. They are
# powers of two, so the products are exact. The key and query factors multiply to 1 / group size.
KEY_FACTORS = {32: 1 / 4, 16: 1 / 4}
QUERY_FACTORS = {32: 1 / 8, 16: 1 / 4}


def entered_reference(
    queries: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], kv_type: str
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return (queries, keys, values) as attention uses them, with keys and values read back from the cache.

    Each array is a float32[..., head size], where values may have a different head size.
    """
    if kv_type == Q8_0:
        queries, keys = hadamard_reference(queries, QUERY_FACTORS), hadamard_reference(keys, KEY_FACTORS)
    return queries, stored_reference(keys, kv_type), stored_reference(values, kv_type)


def stored_reference(values: NDArray[np.float32], kv_type: str) -> NDArray[np.float32]:
    """Round a float32[..., head size] as the cache does, and return a float32 array of the same shape."""
    if kv_type != Q8_0:
        return values.astype(np.float16).astype(np.float32)
    whole = values.shape[-1] // GROUP * GROUP
    parts = [values[..., at : at + GROUP] for at in range(0, whole, GROUP)]
    parts += [values[..., whole:]] if whole < values.shape[-1] else []
    return np.concatenate([_group_reference(part) for part in parts], axis=-1)


def _group_reference(values: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        largest = np.abs(values).max(-1, keepdims=True)
        scale = (largest / np.float32(127)).astype(np.float16).astype(np.float32)
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        integers = np.clip(np.rint(values * inverse), -127, 127)
        result: NDArray[np.float32] = np.where(np.isfinite(scale), np.nan_to_num(integers) * scale, np.float32(np.nan))
    return result


def hadamard_reference(x: NDArray[np.float32], factors: dict[int, float]) -> NDArray[np.float32]:
    """Rotate each group of float32[..., head size] with a Hadamard matrix.

    `factors` maps each group size to the factor that is applied afterwards.
    """
    rotated = np.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, x.shape[-1], GROUP):
            group = x[..., first : first + GROUP]
            size = group.shape[-1]
            lanes = np.arange(size)
            distance = 1
            while distance < size:
                partners = group[..., lanes ^ distance]
                group = np.where(lanes & distance, partners - group, partners + group)
                distance *= 2
            rotated[..., first : first + GROUP] = group * np.float32(factors[size])
    return rotated
