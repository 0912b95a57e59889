"""Operations on the running state of a query's softmax, which merge the states of several chunks.

A state consists of the weighted sum of the values [value size], the maximum score, and the sum of the weights. The
state of a single chunk also has the unit of integer weights, which is not needed here.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts.kv import KVType, state_floats
from llmrun.kernels.attention.hadamard import value_rotations
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_f32, store_f32
from llmrun.kernels.compiler import inline_function

LOWEST = -3.0e38


def states(level: str, kind: KVType, value_size: int) -> tuple[Any, Any, Any]:
    """Return (begin, add, finish), functions that initialize a state, merge another into it, and write the result.

    `kind` is the type of the values in the cache.
    """
    rotate_back = value_rotations(kind, value_size).read
    operations = simd.Operations(level)
    fma, exp = operations.fma, operations.exp
    largest_at, sum_at = 4 * value_size, 4 * value_size + 4

    @inline_function
    def begin(state: Any, sinks: Any, head: Any) -> Any:
        """Initialize a state. `sinks` is the address of all heads' attention sinks, or 0 if there are none."""
        for at in range(0, 4 * value_size, 64):
            simd.store_f32x16(state + at, simd.splat(types.float32(0)))
        if sinks != 0:
            store_f32(state + largest_at, load_f32(sinks + 4 * head))
            store_f32(state + sum_at, types.float32(1))
        else:
            store_f32(state + largest_at, types.float32(LOWEST))
            store_f32(state + sum_at, types.float32(0))

    @inline_function
    def add(state: Any, later: Any) -> Any:
        """Merge the state of later positions into the state of earlier positions."""
        largest = max(load_f32(state + largest_at), load_f32(later + largest_at))
        # A vector holds both exponents, because exp takes as long as merging 64 features.
        factors = exp(_pair(load_f32(state + largest_at) - largest, load_f32(later + largest_at) - largest))
        faded, weight = simd.splat(simd.first_lane(factors)), simd.splat(_second_lane(factors))
        for at in range(0, 4 * value_size, 64):
            before = simd.multiply(simd.load_f32x16(state + at), faded)
            simd.store_f32x16(state + at, fma(simd.load_f32x16(later + at), weight, before))
        total = load_f32(state + sum_at) * simd.first_lane(factors)
        store_f32(state + sum_at, total + load_f32(later + sum_at) * _second_lane(factors))
        store_f32(state + largest_at, largest)

    @inline_function
    def finish(state: Any, out: Any) -> Any:
        """Divide the weighted sum of the values by the sum of the weights, rotate it back, and store it at `out`."""
        inverse = simd.splat(types.float32(1) / load_f32(state + sum_at))
        for at in range(0, 4 * value_size, 64):
            simd.store_f32x16(out + at, simd.multiply(simd.load_f32x16(state + at), inverse))
        rotate_back(out, out)

    return begin, add, finish


@intrinsic
def _pair(typingctx: Any, first: Any, second: Any) -> Any:
    """Return a vector that begins with two floats. The others equal the second."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.insert_element(simd.emit_splat(builder, args[1]), args[0], simd.I32(0))

    return simd.f32x16(types.float32, types.float32), codegen


@intrinsic
def _second_lane(typingctx: Any, vector: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], simd.I32(1))

    return types.float32(simd.f32x16), codegen


def copy_state(value_size: int) -> Any:
    """Return a function that copies a state."""
    n_bytes = 4 * state_floats(value_size)

    @inline_function
    def copy(state: Any, to: Any) -> Any:
        for at in range(0, n_bytes, 64):
            simd.store_f32x16(to + at, simd.load_f32x16(state + at))

    return copy
