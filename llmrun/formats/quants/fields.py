"""Helpers that extract fields from the bytes of a block. Numbers are little-endian, with the lowest bits first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK = 256  # weights per block, for types with both scales and sub-scales


def blocks_of(raw: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint8]:
    """Split the bytes into blocks: uint8[..., n block_bytes] -> uint8[..., n, block_bytes]."""
    raw = np.ascontiguousarray(raw)
    return raw.reshape(*raw.shape[:-1], raw.shape[-1] // block_bytes, block_bytes)


def halves(field: NDArray[np.uint8], times: float = 1.0) -> NDArray[np.float32]:
    """Decode f16 numbers and multiply them by a power of two: uint8[..., 2 n] -> float32[..., n].

    The result is exact if the power of two is near 1.
    """
    with np.errstate(invalid="ignore"):  # multiplying a signaling NaN would raise a warning
        return np.ascontiguousarray(field).view("<f2").astype(np.float32) * np.float32(times)


def half_bytes(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode numbers as f16: float32[..., n] -> uint8[..., 2 n].

    Numbers are rounded to nearest even. Numbers beyond 65504 become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(numbers).astype("<f2").view(np.uint8)


def words16(field: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Decode 16-bit words: uint8[..., 2 n] -> uint16[..., n]."""
    return np.ascontiguousarray(field).view("<u2").astype(np.uint16, copy=False)


def words32(field: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Decode 32-bit words: uint8[..., 4 n] -> uint32[..., n]."""
    return np.ascontiguousarray(field).view("<u4").astype(np.uint32, copy=False)


def planes(field: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Extract bit planes: uint8[..., m] -> uint8[..., 8 / bits, m].

    The first plane holds the lowest `bits` of every byte, the second plane the next `bits`, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (field[..., None, :] >> shifts[:, None]) & np.uint8((1 << bits) - 1)


def sequence(field: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Extract consecutive `bits`-bit numbers: uint8[..., m] -> uint8[..., 8 m / bits].

    The numbers of the first byte come first, starting with its lowest bits.
    """
    parts = np.swapaxes(planes(field, bits), -1, -2)
    return parts.reshape(*field.shape[:-1], field.shape[-1] * (8 // bits))
