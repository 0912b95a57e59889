"""How the fields of a block are cut out of its bytes. Numbers are little-endian; the lowest bits come first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK = 256  # weights of a block of the types with scales of two levels


def blocks_of(raw: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint8]:
    """uint8[..., n block_bytes] -> uint8[..., n, block_bytes]."""
    raw = np.ascontiguousarray(raw)
    return raw.reshape(*raw.shape[:-1], raw.shape[-1] // block_bytes, block_bytes)


def halves(field: NDArray[np.uint8], times: float = 1.0) -> NDArray[np.float32]:
    """uint8[..., 2 n] -> float32[..., n]: f16 numbers times a power of two near 1, exact."""
    with np.errstate(invalid="ignore"):  # the product makes a NaN quiet that signals
        return np.ascontiguousarray(field).view("<f2").astype(np.float32) * np.float32(times)


def half_bytes(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32[..., n] -> uint8[..., 2 n]: rounded to f16, to nearest even; beyond 65504 is infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(numbers).astype("<f2").view(np.uint8)


def words16(field: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """uint8[..., 2 n] -> uint16[..., n]."""
    return np.ascontiguousarray(field).view("<u2").astype(np.uint16, copy=False)


def words32(field: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """uint8[..., 4 n] -> uint32[..., n]."""
    return np.ascontiguousarray(field).view("<u4").astype(np.uint32, copy=False)


def planes(field: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """uint8[..., m] -> uint8[..., 8 / bits, m]: the lowest `bits` of every byte, then the next ones of every byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (field[..., None, :] >> shifts[:, None]) & np.uint8((1 << bits) - 1)


def sequence(field: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """uint8[..., m] -> uint8[..., 8 m / bits]: every `bits` of the first byte, then those of the second, and so on."""
    parts = np.swapaxes(planes(field, bits), -1, -2)
    return parts.reshape(*field.shape[:-1], field.shape[-1] * (8 // bits))
