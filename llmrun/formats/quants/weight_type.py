"""Weight types: each type's GGUF type ID and block size, and how to read, write, check and pack it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants import unpacked
from llmrun.formats.quants.fields import words16
from llmrun.formats.quants.packed import PackedType
from llmrun.formats.quants.unpacked import Unpack

Dequantize = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
Quantize = Callable[[NDArray[np.float32]], NDArray[np.uint8]]
FindUnsound = Callable[[NDArray[np.uint8]], NDArray[np.bool_]]

_HALF_EXPONENT = np.uint16(0x7C00)  # the exponent of NaN and infinity, with all bits set


@dataclass(frozen=True)
class WeightType:
    """A format for storing weights: `block_weights` consecutive weights of a row take `block_bytes` bytes.

    ggml_id       the type's ID in ggml's `enum ggml_type`, as stored in the file
    dequantize    the reference decoder, uint8[..., blocks * block_bytes] -> float32[..., blocks * block_weights]; None
                  for types that the format defines but llmrun cannot read
    quantize      the inverse of `dequantize`, which rounds like gguf-py; None if gguf-py cannot write the type
    unpack        splits the same bytes into the integers and scales (unpacked.py) that `dequantize` multiplies; None
                  for float types
    half_fields   offsets of the f16 fields in a block: the scale, then the minimum
    other_scales  uint8[n, block_bytes] -> bool[n]: a mask of the blocks with a NaN or an infinity in a scale that is
                  not f16
    packed        the layout in which the kernels store the integers; None for float types and for types packed as bytes
    """

    name: str
    ggml_id: int
    block_weights: int
    block_bytes: int
    dequantize: Dequantize | None = None
    quantize: Quantize | None = None
    unpack: Unpack | None = None
    half_fields: tuple[int, ...] = ()
    other_scales: FindUnsound | None = None
    packed: PackedType | None = None

    def row_bytes(self, n: int) -> int:
        """Return the size in bytes of a row of n weights. Raises ValueError if n is not a whole number of blocks."""
        blocks, rest = divmod(n, self.block_weights)
        if rest:
            raise ValueError(
                f"{n} weights are not a whole number of {self.name} blocks of {self.block_weights} weights"
            )
        return blocks * self.block_bytes


def integer_type(
    name: str,
    ggml_id: int,
    block_weights: int,
    block_bytes: int,
    unpack: Unpack,
    quantize: Quantize | None = None,
    *,
    half_fields: tuple[int, ...] = (),
    other_scales: FindUnsound | None = None,
    packed: PackedType | None = None,
) -> WeightType:
    """Create a weight type made of integers and scales. `dequantize` is derived from `unpack`."""
    return WeightType(
        name,
        ggml_id,
        block_weights,
        block_bytes,
        lambda raw: unpacked.dequantize(unpack(raw)),
        quantize,
        unpack,
        half_fields,
        other_scales,
        packed,
    )


def all_set(words: NDArray[np.unsignedinteger], bits: np.unsignedinteger) -> NDArray[np.bool_]:
    """Return a mask of the words in which all of the given bits are set."""
    found: NDArray[np.bool_] = (words & bits) == bits
    return found


def unsound_halves(words: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Return a mask of the f16 numbers that are NaN or infinite."""
    return all_set(words, _HALF_EXPONENT)


def unsound_half_field(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.bool_]:
    """Return a mask of the blocks whose f16 field at `offset` is NaN or infinite: uint8[n, block_bytes] -> bool[n]."""
    return unsound_halves(words16(blocks[:, offset : offset + 2])[:, 0])
