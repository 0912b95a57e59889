"""Keys are spread out before they are rounded to 8 bits.

A few features of SmolLM2's keys are many times as large as the others, and set the scale of their group. A product with
a Hadamard matrix (entries of 1 and -1, orthogonal but for a factor) makes all features of a group about as large; a
query spread alike has the same product with the key. It takes the divergence that the q8_0 cache costs from 6.0e-4 to
2.5e-4 nats; llama.cpp does so too, and has 3.0e-4. For values, which are more even, little would be won.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.compiler import inline_function
from llmrun.layouts.kv_blocks import GROUP

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Powers of two, with which products are exact: of a group of 32 they make 1/32 together, of one of 16 1/16.
_KEY_FACTOR = 1 / 4
_QUERY_FACTOR = {32: 1 / 8, 16: 1 / 4}


def spreading(head_size: int) -> tuple[Any, Any]:
    """(spread a key, spread a query): each changes float32[head size] in memory."""
    return _spread(head_size, dict.fromkeys(_QUERY_FACTOR, _KEY_FACTOR)), _spread(head_size, _QUERY_FACTOR)


def _spread(head_size: int, factors: dict[int, float]) -> Any:
    whole = head_size // GROUP * GROUP
    factor, last_factor = factors[GROUP], factors[simd.LANES]

    @inline_function
    def spread(x: Any) -> Any:
        for feature in range(0, whole, GROUP):
            low = _hadamard(simd.load_f32x16(x + 4 * feature))
            high = _hadamard(simd.load_f32x16(x + 4 * feature + 64))
            scale = simd.splat(types.float32(factor))
            simd.store_f32x16(x + 4 * feature, simd.multiply(simd.add(low, high), scale))
            simd.store_f32x16(x + 4 * feature + 64, simd.multiply(simd.subtract(low, high), scale))
        if whole < head_size:
            last = _hadamard(simd.load_f32x16(x + 4 * whole))
            simd.store_f32x16(x + 4 * whole, simd.multiply(last, simd.splat(types.float32(last_factor))))

    return spread


@intrinsic
def _hadamard(typingctx: Any, vector: Any) -> Any:
    """The product of a 16 x 16 Hadamard matrix and 16 floats: sums and differences of lanes 1, 2, 4 and 8 apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        [vector] = args
        for distance in (1, 2, 4, 8):
            lanes = ir.Constant(ir.VectorType(simd.I32, 16), [lane ^ distance for lane in range(16)])
            partners = builder.shuffle_vector(vector, vector, lanes)
            signs = ir.Constant(simd.F32X16, [-1.0 if lane & distance else 1.0 for lane in range(16)])
            vector = builder.fadd(partners, builder.fmul(vector, signs))
        return vector

    return simd.f32x16(simd.f32x16), codegen


def spread_key_reference(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32[..., head size]."""
    return _spread_reference(keys, dict.fromkeys(_QUERY_FACTOR, _KEY_FACTOR))


def spread_query_reference(queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32[..., head size]."""
    return _spread_reference(queries, _QUERY_FACTOR)


def _spread_reference(x: NDArray[np.float32], factors: dict[int, float]) -> NDArray[np.float32]:
    import numpy as np

    spread = np.empty_like(x)
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
            spread[..., first : first + GROUP] = group * np.float32(factors[size])
    return spread
