"""NumPy functions (sigmoid, softplus, soft cap, softmax) that the twins of several ops share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sigmoid_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    top = np.where(x < 0, e, np.float32(1))
    return (top / (np.float32(1) + e)).astype(np.float32)


def softplus_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute softplus, log(1 + exp(x)), without overflow."""
    result: NDArray[np.float32] = np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))
    return result


def soft_cap_reference(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    """Compute cap * tanh(x / cap)."""
    result: NDArray[np.float32] = np.float32(cap) * np.tanh(x / np.float32(cap))
    return result


def softmax_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the softmax of each row of float32[rows, width]."""
    e = np.exp(x - x.max(1, keepdims=True))
    result: NDArray[np.float32] = e / e.sum(1, keepdims=True)
    return result
